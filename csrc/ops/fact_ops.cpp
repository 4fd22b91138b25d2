// error_take, build_facts, cuda_driver, trace_*: what failed, what this library is, what it has seen.
#include <string>
#include <utility>

#include "core/trace.h"
#include "cuda/cuda_backend.h"
#include "ops/checks.h"
#include "ops/guard.h"

namespace roundpipe::ops {
namespace {

// Not guarded: the guard would forget what this takes.
std::string error_take() {
  const ErrorRecord record = std::exchange(error_record(), ErrorRecord{});
  if (record.kind.empty()) return "";
  return record.kind + '\x1f' + std::to_string(record.number) + '\x1f' + record.message;
}

std::string build_facts() {
  return std::string("compiler: ") + __VERSION__ + "\ntorch headers: " + TORCH_VERSION +
         "\nstable ABI target: 2.11\nC++: " + std::to_string(__cplusplus) +
         "\nlibstdc++ ABI: " + std::to_string(_GLIBCXX_USE_CXX11_ABI);
}

std::string cuda_driver() {
  std::string why_not;
  if (cuda_driver_available(&why_not)) return "";
  return why_not.empty() ? "no CUDA driver" : why_not;
}

void trace_start(std::int64_t capacity) {
  if (capacity < 1) refuse("capacity", "1 or more spans", std::to_string(capacity));
  Trace::global().start(static_cast<std::size_t>(capacity));
}

const char* span_kind_name(SpanKind kind) {
  switch (kind) {
    case SpanKind::kJob:
      return "job";
    case SpanKind::kCopy:
      return "copy";
    case SpanKind::kWait:
      return "wait";
    case SpanKind::kUpdate:
      return "update";
  }
  return "unknown";
}

std::string trace_stop() {
  std::string lines;
  for (const Span& span : Trace::global().stop()) {
    lines += std::string(span_kind_name(span.kind)) + '\t' + span.name + '\t' + std::to_string(span.track) + '\t' +
             std::to_string(span.begin_ns) + '\t' + std::to_string(span.end_ns) + '\t' + std::to_string(span.argument) +
             '\n';
  }
  for (const TrackName& one : Trace::global().tracks()) {
    lines += "thread\t" + one.name + '\t' + std::to_string(one.track) + '\t' + std::to_string(one.thread) + '\n';
  }
  return lines;
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  library.impl("error_take", TORCH_BOX(&roundpipe::ops::error_take));
  ROUNDPIPE_OP(library, build_facts);
  ROUNDPIPE_OP(library, cuda_driver);
  ROUNDPIPE_OP(library, trace_start);
  ROUNDPIPE_OP(library, trace_stop);
}
