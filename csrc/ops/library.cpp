// Defines the operators' schemas; the files named after their concepts register the implementations.
#include "ops/schemas.h"
#include "ops/stable_abi.h"

STABLE_TORCH_LIBRARY(roundpipe, library) {
#define ROUNDPIPE_DEFINE(schema) library.def(schema);
  ROUNDPIPE_SCHEMAS(ROUNDPIPE_DEFINE)
#undef ROUNDPIPE_DEFINE
}
