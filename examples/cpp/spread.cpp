// spread.cpp: murmur's environment `spread` in C++, whose servers can work beside murmur's own.
//
//   server HOST:PORT [--envs 32] [--sessions 2] [--security FOLDER] [--evaluate EPISODES]
//
// Three agents cover three landmarks and avoid each other; env_service/envs/spread has the rules.
#include <cmath>
#include <complex>

#include "murmur_server.hpp"

namespace {

using Vector = std::complex<float>;

constexpr int A = 3, EPISODE_STEPS = 25, WIDTH = 4 + 2 * A + 4 * (A - 1);
constexpr float STEP_S = 0.1f, KEPT = 0.75f, KICK = 0.5f, COVERED = 0.1f, LOCAL_RATIO = 0.5f;
constexpr float CONTACT = 0.3f, MARGIN = 1e-3f, STIFFNESS = 100.0f;
const Vector FORCES[] = {{0, 0}, {-1, 0}, {1, 0}, {0, -1}, {0, 1}};

float length(Vector v) { return std::sqrt(std::norm(v)); }

class Spread : public murmur::Environment {
 public:
  void begin(uint64_t seed, const murmur::Row& row) override {
    const uint64_t state = murmur::mix(seed + murmur::GOLDEN);
    for (uint64_t k = 0; k < 4 * A; ++k) {
      const float draw = (murmur::mix(state + (k + 1) * murmur::GOLDEN) >> 40) * 0x1p-24f;
      float (&xy)[2] = reinterpret_cast<float (&)[2]>(place_[k % (2 * A)]);
      xy[k / (2 * A)] = 2 * draw - 1;
    }
    for (Vector& velocity : velocity_) velocity = 0;
    steps_ = 0;
    row.metric(0) = row.metric(1) = 0;
    observe(row);
  }

  bool step(const void* action, const murmur::Row& row) override {
    Vector thrust[A];
    for (int i = 0; i < A; ++i) {
      thrust[i] = KICK * FORCES[static_cast<const int32_t*>(action)[i]];
      for (int j = 0; j < A; ++j) {
        const Vector to = place_[j] - place_[i];
        const float d = std::max(length(to), 1e-9f);
        if (j == i || d >= CONTACT + 20 * MARGIN) continue;
        const float depth = std::log1p(std::exp(double{CONTACT - d} / MARGIN));
        thrust[i] -= STIFFNESS * MARGIN * STEP_S * depth / d * to;
      }
    }
    for (int i = 0; i < A; ++i) {
      place_[i] += STEP_S * velocity_[i];
      velocity_[i] = KEPT * velocity_[i] + thrust[i];
    }
    observe(row);
    score(row);
    return ++steps_ == EPISODE_STEPS;
  }

 private:
  // Writes velocity, place, landmarks and other agents as each agent sees them, and zeros.
  void observe(const murmur::Row& row) const {
    for (int i = 0; i < A; ++i) {
      auto* out = reinterpret_cast<Vector*>(row.observation<float>(0) + i * WIDTH);
      *out++ = velocity_[i];
      *out++ = place_[i];
      for (int l = A; l < 2 * A; ++l) *out++ = place_[l] - place_[i];
      for (int j = 0; j < A; ++j)
        if (j != i) *out++ = place_[j] - place_[i];
    }
  }

  void score(const murmur::Row& row) const {
    float cover = 0;
    row.metric(2) = 0;
    for (int l = A; l < 2 * A; ++l) {
      float nearest = INFINITY;
      for (int i = 0; i < A; ++i) nearest = std::min(nearest, length(place_[l] - place_[i]));
      cover += nearest;
      row.metric(2) += nearest < COVERED;
    }
    for (int i = 0; i < A; ++i) {
      float touching = 0;
      for (int j = 0; j < A; ++j) touching += j != i && length(place_[j] - place_[i]) < CONTACT;
      row.reward()[i] = -(LOCAL_RATIO * touching + (1 - LOCAL_RATIO) * cover);
      row.metric(0) += row.reward()[i];
      row.metric(1) += touching / 2;
    }
  }

  Vector velocity_[A], place_[2 * A];  // places of the agents, then of the landmarks
  int steps_ = 0;
};

constexpr char SPEC[] = R"(
  name: "spread"
  num_agents: 3
  observations { name: "observation" dtype: "float32" shape: 18 per_agent: true }
  action { discrete { num_actions: 5 } }
  metrics: ["return", "collisions", "occupied"]
  max_episode_steps: 25)";

}  // namespace

int main(int count, char** words) {
  try {
    return murmur::serve({count, words}, SPEC, [] { return std::make_unique<Spread>(); });
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
