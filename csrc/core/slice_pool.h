// A few threads that run one loop over [0, elements) in slices together with the calling thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace roundpipe {

class HappensBefore;

class SlicePool {
 public:
  using Body = std::function<void(std::size_t begin, std::size_t end)>;

  // `threads` counts the caller of run(): one thread fewer is started. `name`: of the threads, static storage.
  SlicePool(std::size_t threads, HappensBefore* checker, const char* name = "rp-optim");
  ~SlicePool();
  SlicePool(const SlicePool&) = delete;
  SlicePool& operator=(const SlicePool&) = delete;

  // Returns when every slice has run; rethrows the first exception, after which no new slice is begun. Every slice
  // begins at a multiple of `grain` and, but for the last, is at least that long. One run at a time.
  void run(std::size_t elements, std::size_t grain, const Body& body);
  std::size_t threads() const noexcept { return workers_.size() + 1; }

 private:
  struct Work {
    const Body* body;
    std::size_t elements;
    std::size_t slice;
    std::atomic<std::size_t> next{0};  // first element of no slice yet; only this makes slices disjoint
    std::mutex failed;                 // guards `failure`
    std::exception_ptr failure;
  };
  void work_loop(std::size_t index);
  static void run_slices(Work& work);

  std::mutex mutex_;              // guards everything below but the threads themselves
  std::condition_variable call_;  // to the workers: new work, or stop
  std::condition_variable left_;  // to run(): a worker has left the work
  Work* work_ = nullptr;          // lives on the stack of run(), which waits until active_ is 0
  std::uint64_t generation_ = 0;  // of work_: a worker joins each work once
  std::size_t active_ = 0;        // workers inside work_
  bool stop_ = false;
  HappensBefore* checker_;
  const char* const name_;
  std::vector<std::thread> workers_;
};

}  // namespace roundpipe
