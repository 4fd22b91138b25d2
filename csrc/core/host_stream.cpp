#include "core/host_stream.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "core/errors.h"

namespace roundpipe {

HostRuntime::HostRuntime(const HostBackendOptions& options)
    : checker_(options.check ? std::make_unique<HappensBefore>() : nullptr),
      delays_{options.seed, options.max_delay_us, 1},
      failing_copy_(options.fail_copy_at) {}

HostRuntime::Delays HostRuntime::delays() const {
  std::lock_guard lock(mutex_);
  return delays_;
}

void HostRuntime::set_delays(std::uint64_t seed, std::uint32_t max_us) {
  std::lock_guard lock(mutex_);
  delays_ = {seed, max_us, delays_.generation + 1};
}

void HostRuntime::fail_copy_after(std::int64_t copies) {
  std::lock_guard lock(mutex_);
  failing_copy_ = copies < 0 ? -1 : copies_ + copies;
}

bool HostRuntime::count_copy() {
  std::lock_guard lock(mutex_);
  return copies_++ == failing_copy_;
}

std::uint64_t HostRuntime::next_stream_number() {
  std::lock_guard lock(mutex_);
  return streams_++;
}

EventRecord::~EventRecord() {
  if (HappensBefore* checker = runtime_->checker()) checker->forget_token(this);
}

void EventRecord::complete(HappensBefore::Actor by, std::shared_ptr<StreamFailure> failure) {
  if (HappensBefore* checker = runtime_->checker()) checker->release(this, by);
  std::lock_guard lock(mutex_);
  completed_ = true;
  failure_ = std::move(failure);
  completed_changed_.notify_all();
}

bool EventRecord::completed() const {
  std::lock_guard lock(mutex_);
  return completed_;
}

void EventRecord::wait() const {
  std::unique_lock lock(mutex_);
  completed_changed_.wait(lock, [&] { return completed_; });
}

void EventRecord::acquire(HappensBefore::Actor into) const { runtime_->checker()->acquire(this, into); }

void EventRecord::throw_failure_once() const {
  std::shared_ptr<StreamFailure> failure;
  {
    std::lock_guard lock(mutex_);
    failure = failure_;
  }
  if (failure && !failure->reported.exchange(true)) throw DriverError(failure->message, kInjectedFailure);
}

void HostEvent::set(std::shared_ptr<EventRecord> record) {
  std::lock_guard lock(mutex_);
  record_.swap(record);
}

std::shared_ptr<EventRecord> HostEvent::current() const {
  std::lock_guard lock(mutex_);
  return record_;
}

HostStream::HostStream(std::shared_ptr<HostRuntime> runtime, HappensBefore::Actor actor)
    : runtime_(std::move(runtime)), actor_(actor), number_(runtime_->next_stream_number()) {}

void HostStream::declare(Access access, const void* range, std::size_t bytes, const char* what) {
  if (HappensBefore* checker = runtime_->checker()) checker->access(actor_, access, range, bytes, what);
}

void HostStream::fail(std::string message) {
  std::lock_guard lock(mutex_);
  if (failure_ && !failure_->reported) return;  // the first one carries the reason
  failure_ = std::make_shared<StreamFailure>();
  failure_->message = std::move(message);
}

std::shared_ptr<StreamFailure> HostStream::failure() const {
  std::lock_guard lock(mutex_);
  return failure_ && !failure_->reported ? failure_ : nullptr;
}

void HostStream::delay() {
  const HostRuntime::Delays delays = runtime_->delays();
  if (delays.max_us == 0) return;
  std::uint64_t micros = 0;
  {
    std::lock_guard lock(mutex_);
    if (delay_generation_ != delays.generation) {
      delay_generation_ = delays.generation;
      random_.seed(delays.seed ^ number_);
    }
    micros = random_() % (std::uint64_t{delays.max_us} + 1);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(micros));
}

namespace {

class ComputeStream final : public HostStream {
 public:
  using HostStream::HostStream;

  void run(std::function<void()> operation) override {
    delay();
    if (HappensBefore* checker = runtime_->checker()) checker->join(actor(), checker->this_thread());
    operation();
  }
};

class CopyStream final : public HostStream {
 public:
  CopyStream(std::shared_ptr<HostRuntime> runtime, HappensBefore::Actor actor, const std::string& name)
      : HostStream(std::move(runtime), actor), queue_(std::make_unique<Queue>()), owner_(getpid()) {
    thread_ = std::thread([this] { work(); });
    pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }

  ~CopyStream() override {
    if (getpid() != owner_) {
      // A forked child has the object but not the thread: joining it would block for ever, and so might destroying a
      // condition variable that the thread was waiting on in the parent. The child leaks them.
      thread_.detach();
      static_cast<void>(queue_.release());
      return;
    }
    {
      std::lock_guard lock(queue_->mutex);
      queue_->closed = true;
    }
    queue_->changed.notify_one();
    thread_.join();
  }

  void run(std::function<void()> operation) override {
    auto item = std::make_unique<Item>(std::move(operation));
    // The operation starts after what this thread has done up to now, not after what it does until the operation's turn
    // comes: so the clock travels with the item. (Joining the stream's clock here would hide the races of operations
    // still queued.)
    if (HappensBefore* checker = runtime_->checker()) checker->release(item.get(), checker->this_thread());
    {
      std::lock_guard lock(queue_->mutex);
      queue_->items.push_back(std::move(item));
    }
    queue_->changed.notify_one();
  }

 private:
  struct Item {
    explicit Item(std::function<void()> operation_) : operation(std::move(operation_)) {}
    std::function<void()> operation;
  };
  struct Queue {
    std::mutex mutex;  // guards everything below
    std::condition_variable changed;
    std::deque<std::unique_ptr<Item>> items;
    bool closed = false;
  };

  std::unique_ptr<Item> take() {
    std::unique_lock lock(queue_->mutex);
    queue_->changed.wait(lock, [&] { return !queue_->items.empty() || queue_->closed; });
    if (queue_->items.empty()) return nullptr;
    std::unique_ptr<Item> item = std::move(queue_->items.front());
    queue_->items.pop_front();
    return item;
  }

  void work() {
    while (std::unique_ptr<Item> item = take()) {
      delay();
      if (HappensBefore* checker = runtime_->checker()) {
        checker->acquire(item.get(), actor());
        checker->forget_token(item.get());
      }
      item->operation();
    }
  }

  std::unique_ptr<Queue> queue_;
  const pid_t owner_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace

std::unique_ptr<HostStream> make_host_copy_stream(std::shared_ptr<HostRuntime> runtime, std::string name) {
  const HappensBefore::Actor actor = runtime->checker() != nullptr ? runtime->checker()->add_actor(name) : 0;
  return std::make_unique<CopyStream>(std::move(runtime), actor, name);
}

std::unique_ptr<HostStream> make_host_compute_stream(std::shared_ptr<HostRuntime> runtime, HappensBefore::Actor actor) {
  return std::make_unique<ComputeStream>(std::move(runtime), actor);
}

}  // namespace roundpipe
