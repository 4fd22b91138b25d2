// What a StageStreamer knows about its jobs, shared with the transfers that work for them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/region_extents.h"
#include "core/stage_streamer.h"

namespace roundpipe {

struct StreamedUnit {
  // Set by enqueue, constant afterwards.
  UnitUse use;
  Ticket upload, load, write;  // load: only with a gradient_load; write: only with gradients
  RegionExtents::Claim weights, gradients;
  std::shared_ptr<Handover> weights_up, gradients_up;  // gradients_up: null without gradients

  // Of the download alone, which hands it from the lane's issuer to its reaper: a place of use.gradient_pool.
  std::shared_ptr<std::byte> gradient_place;

  // Guarded by the streamer's mutex. Each flag has one owner from the moment it is set, so that close, abort and the
  // worker, which may run at the same time, each finish a ticket and release a place exactly once.
  std::exception_ptr failure;         // the first failure of an upload
  bool waited = false;                // compute is ordered after the uploads
  bool weights_given_back = false;    // whoever set this releases the weights' place
  bool gradients_given_back = false;  // whoever set this finishes the write ticket and releases the gradients' place
};

struct StreamedJob {
  std::uint64_t id = 0;
  char* base = nullptr;  // of the region
  std::vector<StreamedUnit> units;
  bool aborted = false;  // guarded by the streamer's mutex; requests of this job that have not started fail
};

struct StageStreamer::State : std::enable_shared_from_this<StageStreamer::State> {
  State(Device& device, TransferEngine& engine);

  // -- streamed_job.cpp: the transfers. They hold the state and the job, and may outlive the streamer.
  TransferRequest weights_upload(const std::shared_ptr<StreamedJob>& job, std::size_t index);
  TransferRequest gradients_upload(const std::shared_ptr<StreamedJob>& job, std::size_t index);
  TransferRequest gradients_download(const std::shared_ptr<StreamedJob>& job, std::size_t index,
                                     std::shared_ptr<Event> computed, GradientsFinished finished);
  void refuse_dead(const StreamedJob& job, const StreamedUnit& unit);  // throws why nothing may start; mutex held
  void transfer_ended();

  // -- for the streamer's calls
  // Throws Poisoned when the job was aborted under the worker's feet.
  std::shared_ptr<StreamedJob> find_job(std::uint64_t id, std::size_t index, const char* call);
  // Tells the checker that compute uses the unit's weights (kRead) or gradients (kWrite), if it ever waited for them.
  // The mutex is held.
  void declare_use(const StreamedJob& job, const StreamedUnit& unit, Access access, Stream& compute);
  void end_job(std::uint64_t job, Stream& compute, bool abort);
  // The place may be overwritten after `last_use` (null: at once). `discard`: all that ever used it is ordered before
  // `last_use`, so its contents may be destroyed in order that a late reader be seen.
  void give_back(const StreamedJob& job, Tenancy& tenancy, std::shared_ptr<Event> last_use, bool discard) noexcept;
  std::shared_ptr<Event> record(Stream& compute);
  void settle_discards() noexcept;  // before the region's memory goes away

  const int owner;  // the process that has the engine's threads
  Device& device;
  TransferEngine& engine;  // not used after its shutdown
  const std::function<void()> poke;
  HappensBefore* const checker;
  // With a checker, places are filled with NaNs as soon as they are given back. A stream of its own, because on the
  // upload stream the fill would queue behind uploads that wait for much later jobs.
  const std::unique_ptr<Stream> discards;

  std::mutex enqueue_mutex;      // placement, tickets and submission are one step: all three follow the order of jobs
  std::mutex mutex;              // guards everything below, and what StreamedJob says it guards
  std::condition_variable idle;  // open jobs or pending transfers became fewer
  char* base = nullptr;
  std::size_t bytes = 0;
  RegionExtents extents{0, nullptr};
  std::map<std::uint64_t, std::shared_ptr<StreamedJob>> jobs;  // open ones
  std::uint64_t next_job = 1;
  std::uint64_t last_aborted = 0;
  std::size_t pending = 0;  // requests handed to the engine whose `finished` has not ended
  bool closing = false;     // no request starts any more

 private:
  Readiness upload_ready(const StreamedJob& job, const StreamedUnit& unit, const RegionExtents::Claim& claim,
                         const Ticket* ticket, const char* what);
  void supersede(RegionExtents::Claim& claim, Stream& upload);
  void uploaded(StreamedUnit& unit, const Ticket* ticket, const std::exception_ptr& failure);
};

}  // namespace roundpipe
