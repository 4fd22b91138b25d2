// What a job handle stands for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/engine.h"

namespace roundpipe::ops {

// The gradient downloads that a job has handed over. Finished on lanes' threads, possibly after the job is forgotten,
// so it is shared with the callbacks and holds the tensors they write.
class Downloads {
 public:
  explicit Downloads(std::vector<Tensor> held) : held_(std::move(held)) {}
  void hand_over();
  void take_back();  // the hand-over failed: no callback will come
  void finish(const std::exception_ptr& failure);
  bool wait(std::chrono::milliseconds timeout);  // rethrows the first failure

 private:
  std::mutex mutex_;  // guards the counters and the failure
  std::condition_variable finished_all_;
  std::size_t handed_ = 0;
  std::size_t finished_ = 0;
  std::exception_ptr failure_;
  std::vector<Tensor> held_;
};

struct Job : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kJob;
  using OfEngine::OfEngine;

  std::size_t device = 0;
  std::uint64_t number = 0;     // the streamer's
  std::vector<bool> gradients;  // by unit: whether this job writes them,
  std::vector<bool> pooled;     // and whether to a place of a pool
  std::vector<std::size_t> image_bytes;
  std::shared_ptr<Downloads> downloads;

  std::mutex mutex;    // guards `ended`: a job is closed once, whoever comes first
  bool ended = false;  // closed or aborted
};

// A job that an operator works on: its engine is open and, unless stated, the job too.
struct OpenJob {
  explicit OpenJob(std::int64_t handle);
  std::size_t unit(std::int64_t index) const;           // InvalidArgument when out of range
  std::size_t gradient_unit(std::int64_t index) const;  // or when the job does not write its gradients
  // Starts the unit's gradients on their way down. `finished` (may be empty) runs once, unless this throws.
  void hand_over(std::size_t unit, GradientsFinished finished);

  std::shared_ptr<Job> job;
  EngineUse use;
  DeviceRoom& room;
};

}  // namespace roundpipe::ops
