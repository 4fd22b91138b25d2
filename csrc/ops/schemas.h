// Every operator of torch.ops.roundpipe, grouped. Implementations stand beside their concept in csrc/ops/*.cpp.
//
// Handles are integers of a typed registry that refuses stale and foreign ones. Waits take milliseconds, release the
// interpreter lock and return false on time-out, so that the caller can look for signals between slices.
#pragma once

// clang-format off
#define ROUNDPIPE_SCHEMAS(def)                                                                                        \
  /* -- data plane: legal inside torch.compile ----------------------------------------------------------------- */  \
  /* Ticket: a CPU int64, the handle of the copy. What start was given must not change before the wait, which gets it */ \
  /* again and copies once more when the ticket was waited for already. Waits end when the copy is complete. */         \
  def("offload_start(Tensor x) -> Tensor")                                                                              \
  def("offload_wait(Tensor ticket, Tensor x) -> Tensor")               /* on the host, pinned for x's device */         \
  def("reload_start(Tensor host, Device device) -> Tensor")                                                             \
  def("reload_wait(Tensor ticket, Tensor host, Device device) -> Tensor")                                               \
  /* The sum of the counted tokens' losses, and its gradients where needed, else empty. Implemented in                 */ \
  /* roundpipe/models/linear_cross_entropy.py. softcap 0: none; chunk_tokens 0: chosen.                                */ \
  def("linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias=None, *, "                       \
      "int ignore_index=-100, float softcap=0.0, int chunk_tokens=0, bool needs_hidden=False, "                         \
      "bool needs_weight=False, bool needs_bias=False) -> (Tensor, Tensor, Tensor, Tensor)")                            \
  def("data_plane_reports() -> str")                                   /* as engine_reports */                          \
  def("data_plane_inject(str what, int a, int b) -> ()")               /* as engine_inject */                           \
  def("data_plane_close(int timeout_ms) -> bool")                      /* at exit; true: all threads have ended */      \
  /* -- host memory ------------------------------------------------------------------------------------------- */   \
  def("host_empty(int[] size, ScalarType dtype) -> Tensor")            /* zero-filled, pinned for the open engine */  \
  def("host_stats() -> int[]")                                         /* HostArenaStats, in order */                 \
  /* host memory of others, in which weights stay; pin: page-lock it where it is. A claim lives as long as its units.   */ \
  def("host_claim(int engine, Tensor[] tensors, bool pin) -> int")                                                      \
  def("host_claim_drop(int claim) -> ()")                                                                               \
  def("host_claim_stats(int claim) -> int[]")                          /* HostClaimStats; claim 0: of all together */   \
  def("host_file_bytes(Tensor[] tensors) -> int")                      /* how much of them is mapped from files */      \
  def("host_limits() -> int[]")                                        /* in the order of _ops.host_limits */         \
  /* -- engine and devices ------------------------------------------------------------------------------------ */   \
  /* kind "cuda" | "host"; devices: driver ordinals, or 0..n-1 */                                                     \
  def("engine_open(str kind, int[] devices, int memory_limit_bytes, bool check) -> int")                             \
  def("engine_close(int engine) -> ()")                                                                              \
  def("engine_set_stream(int engine, int device, int stream) -> ()")   /* native compute stream, before any job */    \
  def("engine_set_region(int engine, int device, Tensor region) -> ()") /* uint8; the engine holds the tensor */      \
  def("engine_bytes(int engine, int device) -> int[]")                 /* 2 directions x 5 kinds of traffic */        \
  def("engine_bounced_bytes(int engine, int device) -> int")           /* of these, up through bounce buffers */      \
  def("engine_reset_bytes(int engine) -> ()")                                                                        \
  def("engine_poke(int engine) -> ()")                                                                               \
  def("engine_wait_idle(int engine, int timeout_ms) -> bool")          /* no open job, no copy under way */           \
  def("engine_reports(int engine) -> str")                             /* races found, one a line; taken */           \
  def("engine_inject(int engine, str what, int a, int b) -> ()")       /* "delay" seed us, or what fails and when */  \
  def("engine_live(int engine) -> int[]")        /* records, record bytes, peak record bytes, open jobs, handles */   \
  /* pinned memory (uint8) for gradients between download and update; it lives as long as what lies in it */            \
  def("gradient_pool_open(int engine, Tensor memory) -> int")                                                          \
  def("gradient_pool_close(int pool) -> ()")                                                                           \
  def("gradient_pool_stats(int pool) -> int[]")                        /* bytes, used, peak, places taken, refused */   \
  /* -- units and tickets ------------------------------------------------------------------------------------- */   \
  /* weights: host tensors (any dtype, contiguous) at `offsets` of the packed image of weight_bytes */                \
  /* claim: of whose memory weights are; 0: all of them are pinned */                                                \
  def("unit_open(int engine, Tensor[] weights, int[] offsets, int weight_bytes, int gradient_bytes, int claim=0) -> int") \
  def("unit_close(int unit) -> ()")                                                                                  \
  def("unit_counters(int unit) -> int[]")                              /* issued x5, completed x5 */                  \
  def("unit_new_epoch(int unit) -> ()")                                                                              \
  def("unit_drop_rule(int unit, int rule) -> ()")                      /* tests */                                    \
  def("ticket_issue(int unit, int kind) -> int")                                                                     \
  def("ticket_wait(int ticket, int timeout_ms) -> int")                /* TicketState */                              \
  def("ticket_finish(int ticket, bool poisoned) -> ()")                /* the handle ends */                          \
  /* -- jobs: stages streamed to a device --------------------------------------------------------------------- */   \
  /* loads/stores: gradient images (uint8, empty = none); a unit with an empty store has no gradients in this job, but  */ \
  /* those at the positions `pooled`, whose gradients come down to places of `pool`                                     */ \
  def("job_open(int engine, int device, int[] units, Tensor[] loads, Tensor[] stores, int[] pooled=[], int pool=0) -> int") \
  def("job_wait_unit(int job, int index, int timeout_ms) -> int[]")    /* done, weights offset, gradients offset|-1 */ \
  def("job_weights_done(int job, int index) -> ()")                                                                  \
  def("job_gradients_done(int job, int index) -> ()")                                                                \
  /* The same, and update_fused when they are there, behind the tickets. A pooled unit's gradients are at byte `offsets`  */ \
  /* of its place; tensors of their dtypes and sizes stand for them in `gradients`. Gives the update's number.            */ \
  def("job_gradients_update(int job, int index, int[] tickets, str algorithm, Tensor[] masters, Tensor[] sources, "       \
      "Tensor[] published, Tensor[] gradients, int[] offsets, Tensor[] moments, Tensor[] scales, float[] steps, "         \
      "int[] seeds, int[] groups, float[] options, float factor) -> int")                                                 \
  def("job_close(int job) -> ()")                                      /* the handle stays until job_forget */        \
  def("job_abort(int job) -> ()")                                                                                    \
  def("job_wait_gradients(int job, int timeout_ms) -> bool")           /* every download finished; rethrows failure */ \
  def("job_forget(int job) -> ()")                                                                                   \
  /* -- activations ------------------------------------------------------------------------------------------- */   \
  /* contiguous device tensors; seed is returned by recompute_begin */                                                \
  def("stash(int engine, int device, Tensor[] tensors, int traffic, int seed) -> int")                               \
  def("stash_host(int engine, Tensor[] tensors) -> int")               /* contiguous host tensors, copied now */       \
  def("record_order_after_read(int record, int device, int timeout_ms) -> bool")                                     \
  def("record_wait(int record, int timeout_ms) -> bool")               /* all bytes on the host */                    \
  def("record_host(int record) -> Tensor[]")           /* after record_wait: over the record's memory, which they hold */ \
  def("record_memory(int record) -> Tensor[]")         /* the same, before the bytes have come: for who waits later */    \
  def("record_drop(int record) -> ()")                                                                               \
  def("fetch_start(int engine, int device, int record, Tensor[] targets, int traffic) -> int")                       \
  def("fetch_wait(int fetch, int timeout_ms) -> bool")                 /* compute continues after it; handle ends */   \
  def("fetch_cancel(int fetch) -> ()")                                 /* the handle ends, whatever its state */       \
  /* recompute of one (microbatch, layer): targets as for fetch_start; end waits (compute order) and gives the seed */ \
  def("recompute_begin(int engine, int device, int record, Tensor[] targets) -> int")                                \
  def("recompute_end(int recompute, int timeout_ms) -> int[]")         /* done, seed; the record is dropped */         \
  def("declare_access(int engine, int device, Tensor tensor, bool write) -> ()")   /* checker: compute touches it */   \
  /* -- optimizer queue --------------------------------------------------------------------------------------- */   \
  /* element-wise targets[i] = / += convert(sources[i]); ticket 0 = none; the ticket's handle ends with the update */   \
  /* non_finite: uint8, one a source; 1 once a slice of it was converted that holds an infinity or NaN */              \
  def("update_convert(int engine, int ticket, Tensor[] sources, Tensor[] targets, int[] accumulate, "                  \
      "Tensor(a!)? non_finite=None) -> int")                                                                           \
  def("update_wait(int engine, int update, int timeout_ms) -> bool")                                                 \
  /* One step of "adam", "sgd" or "lion" in place, behind all tickets. Lists as for adam_update, position by position;  */ \
  /* sources: where weights are read, empty for where they are written; moments: all first ones, then all second ones, */ \
  /* ...; scales: of moments that are uint8 codes, one float32 for 256, in the same order; groups[i]: which row of options, which holds the algorithm's numbers group after group. */                   \
  def("update_fused(int engine, int[] tickets, str algorithm, Tensor[] masters, Tensor[] sources, "                    \
      "Tensor[] published, Tensor[] gradients, Tensor[] moments, Tensor[] scales, float[] steps, int[] seeds, "         \
      "int[] groups, float[] options, float factor) -> int")                                                           \
  /* sums[k]: of the squares of the k-th 65536 elements of the tensors laid end to end */                              \
  def("update_square_sum(int engine, int[] tickets, Tensor[] sources, Tensor sums) -> int")                            \
  /* -- fused optimizer steps, at once ------------------------------------------------------------------------- */    \
  /* Lists position by position, contiguous host tensors. masters: float32, bfloat16, float16, or int16, the low half */ \
  /* of a split master whose bfloat16 is published[i]. An empty list: none. factor multiplies every gradient. seeds: */ \
  /* bfloat16 moments are rounded stochastically by (seed, step, index); steps counts this step. */                    \
  def("adam_update(Tensor(a!)[] masters, Tensor(b!)[] published, Tensor[] gradients, Tensor(c!)[] exp_avgs, "          \
      "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, float[] steps, float lr, float beta1, float beta2, "    \
      "float eps, float weight_decay, bool decoupled, bool maximize, float factor, int[] seeds) -> ()")                \
  /* first[i]: the buffer becomes the gradient */                                                                      \
  def("sgd_update(Tensor(a!)[] masters, Tensor(b!)[] published, Tensor[] gradients, "                                  \
      "Tensor(c!)[] momentum_buffers, int[] first, float lr, float momentum, float dampening, float weight_decay, "    \
      "bool nesterov, bool maximize, float factor, int[] seeds, float[] steps) -> ()")                                 \
  def("lion_update(Tensor(a!)[] masters, Tensor(b!)[] published, Tensor[] gradients, Tensor(c!)[] exp_avgs, "          \
      "float lr, float beta1, float beta2, float weight_decay, bool maximize, float factor, int[] seeds, "             \
      "float[] steps) -> ()")                                                                                          \
  def("split_master(Tensor source, Tensor(a!) upper, Tensor(b!) low) -> ()")       /* float32 to bfloat16, int16 */    \
  def("join_master(Tensor upper, Tensor low, Tensor(a!) target) -> ()")                                                \
  /* eight-bit moments; moment 0 has signed codes, the others unsigned ones */                                         \
  def("encode_moment(Tensor source, Tensor(a!) codes, Tensor(b!) scales, int moment) -> ()")                           \
  def("decode_moment(Tensor codes, Tensor scales, Tensor(a!) target, int moment) -> ()")                               \
  /* -- handles ------------------------------------------------------------------------------------------------ */  \
  /* int64: `handles`, which end when the tensor's memory goes, those that have not ended by then                       */ \
  def("handle_keeper(int[] handles) -> Tensor")                                                                         \
  /* -- errors, facts, trace ---------------------------------------------------------------------------------- */   \
  def("error_take() -> str")                     /* kind \x1f number \x1f message of this thread's last failure */     \
  def("build_facts() -> str")                                                                                        \
  def("cuda_driver() -> str")                                          /* empty: available; else why not */            \
  def("isa_names() -> str")                                            /* comma separated, best first, supported */    \
  def("isa_active() -> str")                                                                                         \
  def("isa_force(str name) -> ()")                                     /* empty: automatic */                          \
  def("convert(Tensor source, Tensor(a!) target, bool accumulate) -> ()")                                            \
  def("trace_start(int capacity) -> ()")                                                                             \
  def("trace_stop() -> str")                                           /* one span a line, tab separated */
// clang-format on
