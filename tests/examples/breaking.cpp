// breaking.cpp: episodes that fail, continuous actions, legal ones, and time steps in several parts.
#include <memory>

#include "murmur_server.hpp"

namespace {

constexpr int AGENTS = 2, SIZE = 3, PIXELS = 1 << 17;

class Breaking : public murmur::Environment {
 public:
  void begin(uint64_t seed, const murmur::Row& row) override {
    seed_ = seed, steps_ = 0;
    if (seed % 5 == 0) throw std::runtime_error("no start");
    see(row);
  }

  bool step(const void* action, const murmur::Row& row) override {
    const auto* actions = static_cast<const float*>(action);
    if (++steps_ == 3 && seed_ % 3 == 0) throw std::runtime_error("no step");
    see(row);
    for (int i = 0; i < AGENTS * SIZE; ++i) row.reward()[i / SIZE] += actions[i];
    row.metric(0) = steps_;
    row.discount() = steps_ < 6;
    return steps_ == 6;
  }

 private:
  void see(const murmur::Row& row) const {
    std::memset(row.observation<uint8_t>(0), int(seed_ % 251) + steps_, AGENTS * PIXELS);
    row.observation<float>(1)[0] = float(steps_);
  }

  uint64_t seed_ = 0;
  int steps_ = 0;
};

constexpr char SPEC[] = R"(
  name: "breaking"
  num_agents: 2
  observations { name: "pixels" dtype: "uint8" shape: 131072 per_agent: true }
  observations { name: "state" dtype: "float32" shape: 1 }
  action { continuous { size: 3 low: -1 high: 1 } }
  metrics: "steps"
  max_episode_steps: 6)";

}  // namespace

int main(int count, char** words) {
  return murmur::serve({count, words}, SPEC, [] { return std::make_unique<Breaking>(); });
}
