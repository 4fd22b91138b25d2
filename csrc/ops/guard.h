// Registers an operator so that its name is known to error messages and its failures are recorded for Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "ops/error_record.h"
#include "ops/stable_abi.h"

namespace roundpipe::ops {

template <std::size_t N>
struct OpName {
  char text[N]{};
  consteval OpName(const char (&name)[N]) { std::copy_n(name, N, text); }  // NOLINT: implicit on purpose
};

template <OpName Name, auto Function>
struct Guarded;

template <OpName Name, class Result, class... Args, Result (*Function)(Args...)>
struct Guarded<Name, Function> {
  static Result call(Args... args) {
    begin_op(Name.text);
    try {
      return Function(static_cast<Args&&>(args)...);
    } catch (...) {
      fail_op();
    }
  }
};

}  // namespace roundpipe::ops

#define ROUNDPIPE_OP(library, name) \
  (library).impl(#name, TORCH_BOX((&::roundpipe::ops::Guarded<#name, &::roundpipe::ops::name>::call)))
