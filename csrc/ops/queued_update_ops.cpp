// update_fused, update_square_sum, job_gradients_update: optimizer steps of whole units on the engine's queue, and what
// clipping needs before.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/update_kernels.h"
#include "ops/checks.h"
#include "ops/fused_update.h"
#include "ops/guard.h"
#include "ops/job.h"
#include "ops/update_list.h"
#include "ops/update_tickets.h"

namespace roundpipe::ops {
namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<std::int64_t>;
using Floats = std::vector<double>;

std::int64_t update_fused(std::int64_t engine, Integers tickets, std::string algorithm, Tensors masters,
                          Tensors sources, Tensors published, Tensors gradients, Tensors moments, Tensors scales,
                          Floats steps, Integers seeds, Integers groups, Floats options, double factor) {
  EngineUse use(engine, "engine");
  PreparedUpdate prepared =
      prepare_fused({std::move(algorithm), std::move(masters), std::move(sources), std::move(published),
                     std::move(gradients), std::move(moments), std::move(scales), std::move(steps), std::move(seeds),
                     std::move(groups), std::move(options), factor},
                    /*placed=*/false);
  give_tickets(use, tickets, "tickets", prepared.update);
  return static_cast<std::int64_t>(use->queue().submit(std::move(prepared.update)));
}

// An update on its way to the queue behind a download; it ends its tickets and its number whatever comes of that.
struct ArrivingUpdate {
  std::shared_ptr<OptimizerQueue> queue;
  std::uint64_t number;
  PreparedUpdate prepared;
  Integers offsets;

  void arrive(const std::exception_ptr& failure, std::shared_ptr<std::byte> place) {
    if (failure) return give_up(failure);
    const std::vector<UpdateTicket> tickets = prepared.update.tickets;
    try {
      if (prepared.place) {
        // Gone before the update runs: the place is to end with it, on its thread.
        const auto put = std::exchange(prepared.place, {});
        put(prepared.update, offsets, std::move(place));
      }
      queue->submit(number, std::move(prepared.update));
    } catch (...) {  // the queue has ended
      prepared.update.tickets = tickets;
      give_up(std::current_exception());
    }
  }
  void give_up(const std::exception_ptr& failure) {
    for (const UpdateTicket& one : prepared.update.tickets) one.unit->clock.poison(one.ticket);
    prepared = {};
    queue->give_up(number, failure);
  }
};

std::int64_t job_gradients_update(std::int64_t job, std::int64_t index, Integers tickets, std::string algorithm,
                                  Tensors masters, Tensors sources, Tensors published, Tensors gradients,
                                  Integers offsets, Tensors moments, Tensors scales, Floats steps, Integers seeds,
                                  Integers groups, Floats options, double factor) {
  OpenJob open(job);
  const std::size_t unit = open.gradient_unit(index);
  const bool placed = open.job->pooled[unit];
  const std::size_t image_bytes = open.job->image_bytes[unit];
  if (placed) {
    require_same_length("offsets", offsets.size(), "gradients", gradients.size());
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      const std::size_t bytes = byte_count(gradients[i]);
      if (offsets[i] < 0 || bytes > image_bytes || static_cast<std::size_t>(offsets[i]) > image_bytes - bytes ||
          offsets[i] % 4 != 0) {
        refuse(at("offsets", i),
               "a place, aligned to 4, inside the " + std::to_string(image_bytes) + " bytes of the unit's gradients",
               std::to_string(offsets[i]) + " for " + std::to_string(bytes) + " bytes");
      }
    }
  } else if (!offsets.empty()) {
    refuse("offsets", "none: the job was opened with an image for this unit", std::to_string(offsets.size()));
  }
  auto arriving = std::make_shared<ArrivingUpdate>();
  arriving->prepared =
      prepare_fused({std::move(algorithm), std::move(masters), std::move(sources), std::move(published),
                     std::move(gradients), std::move(moments), std::move(scales), std::move(steps), std::move(seeds),
                     std::move(groups), std::move(options), factor},
                    placed);
  give_tickets(open.use, tickets, "tickets", arriving->prepared.update);
  arriving->offsets = std::move(offsets);
  arriving->queue = open.use->share_queue();
  arriving->number = arriving->queue->reserve();
  try {
    open.hand_over(unit, [arriving](const std::exception_ptr& failure, std::shared_ptr<std::byte> place) {
      arriving->arrive(failure, std::move(place));
    });
  } catch (...) {
    arriving->give_up(std::current_exception());
    throw;
  }
  return static_cast<std::int64_t>(arriving->number);
}

std::int64_t update_square_sum(std::int64_t engine, Integers tickets, Tensors sources, Tensor sums) {
  EngineUse use(engine, "engine");
  UpdateTensors tensors;
  tensors.masters = sources;  // as an update that writes nothing: the same checks and the same index space
  tensors.gradients = sources;
  struct Sums {
    UpdateList list;
    std::vector<Tensor> held;
    double* sums = nullptr;
  };
  auto work = std::make_shared<Sums>(Sums{UpdateList(tensors), {}});
  require_contiguous(sums, "sums", Place{});
  const std::size_t chunks = (work->list.index_space() + kUpdateGrain - 1) / kUpdateGrain;
  if (sums.scalar_type() != ScalarType::Double || sums.numel() != static_cast<std::int64_t>(chunks)) {
    refuse("sums", std::to_string(chunks) + " float64", describe(sums));
  }
  work->sums = static_cast<double*>(sums.mutable_data_ptr());
  hold_all(work->held, sources);
  work->held.push_back(detached(sums));
  Update update;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    declare_access(update, Access::kRead, sources[i].const_data_ptr(), byte_count(sources[i]), "norm reads gradients");
  }
  declare_access(update, Access::kWrite, work->sums, chunks * sizeof(double), "norm writes sums");
  update.elements = work->list.index_space();
  update.grain = kUpdateGrain;
  update.body = [work](std::size_t begin, std::size_t end) {
    const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
    // A slice may hold several chunks; a sum that followed slices would depend on the number of threads.
    for (std::size_t chunk = begin / kUpdateGrain; chunk * kUpdateGrain < end; ++chunk) {
      double sum = 0;
      work->list.run(chunk * kUpdateGrain, std::min(end, (chunk + 1) * kUpdateGrain),
                     [&](std::size_t i, std::size_t from, std::size_t to) {
                       const cpu::UpdateSpans& spans = work->list.spans(i);
                       const auto* base = static_cast<const std::byte*>(spans.gradient);
                       sum += kernels.square_sum(base + from * size_of(spans.gradient_dtype), spans.gradient_dtype,
                                                 to - from);
                     });
      work->sums[chunk] = sum;
    }
  };
  give_tickets(use, tickets, "tickets", update);
  return static_cast<std::int64_t>(use->queue().submit(std::move(update)));
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, update_fused);
  ROUNDPIPE_OP(library, job_gradients_update);
  ROUNDPIPE_OP(library, update_square_sum);
}
