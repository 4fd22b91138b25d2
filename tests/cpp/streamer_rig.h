// A simulated device with an engine, a streamer and units of known content, for the streamer's tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_backend.h"
#include "core/stage_streamer.h"
#include "core/transfer_engine.h"
#include "probe_device.h"

namespace roundpipe {

inline constexpr std::chrono::milliseconds kLong{20'000};
inline constexpr std::chrono::milliseconds kNow{0};

using Word = std::uint32_t;

// A unit with its host memory: weights in separately allocated segments, a gradient image.
struct RigUnit {
  std::shared_ptr<WeightUnit> unit;
  std::vector<std::vector<Word>> weights;  // by segment
  std::vector<Word> gradients;

  // The content of word `i` of the packed image.
  Word word(std::size_t segment, std::size_t i) const {
    return static_cast<Word>(unit->id * 1'000'003 + segment * 1009 + i + version * 77'777);
  }
  void fill() {
    for (std::size_t s = 0; s < weights.size(); ++s) {
      for (std::size_t i = 0; i < weights[s].size(); ++i) weights[s][i] = word(s, i);
    }
  }
  bool matches(const void* image) const {
    for (std::size_t s = 0; s < weights.size(); ++s) {
      const auto* words = reinterpret_cast<const Word*>(static_cast<const char*>(image) + unit->weights[s].offset);
      for (std::size_t i = 0; i < weights[s].size(); ++i) {
        if (words[i] != word(s, i)) return false;
      }
    }
    return true;
  }
  Word version = 0;
};

struct StreamerRig {
  explicit StreamerRig(std::size_t region_bytes_, HostBackendOptions backend_options = {.devices = 1, .check = true},
                       TransferOptions options = {.chunk_bytes = 512})
      : backend(backend_options), probe(backend.device(0)), region(region_bytes_ / sizeof(std::uint64_t)) {
    options.checker = backend.checker();
    engine = std::make_unique<TransferEngine>(probe, options);
    streamer = std::make_unique<StageStreamer>(probe, *engine);
    compute = probe.wrap_compute_stream(0);
    streamer->set_region(region.data(), region_bytes());
  }
  ~StreamerRig() {
    streamer.reset();
    engine.reset();
  }

  std::size_t region_bytes() const { return region.size() * sizeof(std::uint64_t); }

  std::unique_ptr<RigUnit> make_unit(std::vector<std::size_t> segment_words, std::size_t gradient_words) {
    auto made = std::make_unique<RigUnit>();
    made->unit = std::make_shared<WeightUnit>(backend.checker());
    made->unit->id = next_id++;
    std::size_t offset = 0;
    for (const std::size_t words : segment_words) {
      made->weights.emplace_back(words);
      made->unit->weights.push_back({made->weights.back().data(), offset, words * sizeof(Word)});
      offset += words * sizeof(Word);
    }
    made->unit->weight_bytes = (offset + 255) / 256 * 256;
    made->unit->gradient_bytes = gradient_words * sizeof(Word);
    made->gradients.assign(gradient_words, 0);
    made->unit->clock.set_observer(engine->poker());
    made->fill();
    if (HappensBefore* checker = backend.checker()) {
      for (const auto& segment : made->weights) checker->fresh(segment.data(), segment.size() * sizeof(Word));
      checker->fresh(made->gradients.data(), gradient_words * sizeof(Word));
    }
    return made;
  }

  UnitPlace wait(std::uint64_t job, std::size_t index) {
    UnitPlace place;
    if (streamer->wait_unit(job, index, *compute, kLong, &place) != WaitResult::kDone) {
      throw std::runtime_error("wait_unit timed out");
    }
    return place;
  }
  bool arrives(std::uint64_t job, std::size_t index, std::chrono::milliseconds timeout) {
    UnitPlace place;
    return streamer->wait_unit(job, index, *compute, timeout, &place) == WaitResult::kDone;
  }
  static void add(const UnitPlace& place, const RigUnit& unit, Word amount) {
    auto* words = static_cast<Word*>(place.gradients);
    for (std::size_t i = 0; i < unit.gradients.size(); ++i) words[i] += amount + static_cast<Word>(i);
  }
  std::vector<std::string> reports() {
    return backend.checker() != nullptr ? backend.checker()->take_reports() : std::vector<std::string>();
  }

  HostBackend backend;
  ProbeDevice probe;
  std::vector<std::uint64_t> region;
  std::unique_ptr<TransferEngine> engine;
  std::unique_ptr<Stream> compute;
  std::unique_ptr<StageStreamer> streamer;
  std::uint64_t next_id = 1;
};

inline UnitUse reads(const RigUnit& unit) { return {.unit = unit.unit}; }
inline UnitUse writes(RigUnit& unit, bool load = false) {
  return {.unit = unit.unit,
          .gradients = true,
          .gradient_load = load ? unit.gradients.data() : nullptr,
          .gradient_store = unit.gradients.data()};
}

// Every ticket ever issued has ended.
inline bool settled(const RigUnit& unit) {
  for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
    const auto ticket_kind = static_cast<TicketKind>(kind);
    if (unit.unit->clock.issued(ticket_kind) != unit.unit->clock.completed(ticket_kind)) return false;
  }
  return true;
}

}  // namespace roundpipe
