// murmur_server.hpp: an environment server that keeps the contract of docs/wire.md.
// Derive from Environment, describe it by an EnvSpec, and call serve().
#pragma once

#include <google/protobuf/text_format.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "rollout.pb.h"

namespace murmur {

namespace pb = v1;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

enum StepType : uint8_t { FIRST, MID, LAST, ABORTED };

// The arrays of one environment's time step, to be written to. Before every call rewards are 0 and
// the discount is 1; the rest is as last written.
struct Row {
  std::vector<char*> arrays;  // in the order of the wire
  size_t metrics;             // index of the first metric

  float* reward() const { return reinterpret_cast<float*>(arrays[0]); }     // [agents]
  float& discount() const { return *reinterpret_cast<float*>(arrays[1]); }  // 0: terminated
  template <class T>
  T* observation(size_t i) const { return reinterpret_cast<T*>(arrays[2 + i]); }
  float& metric(size_t i) const { return *reinterpret_cast<float*>(arrays[metrics + i]); }
};

// One environment. If a method throws, its episode is dropped and the next one begins.
class Environment {
 public:
  virtual ~Environment() = default;
  // Begins an episode. All that happens in it follows from its seed and its actions.
  virtual void begin(uint64_t seed, const Row& row) = 0;
  // Takes a decision of all agents: int32_t [agents] if actions are discrete, else float
  // [agents, size]. Returns true at the episode's end.
  virtual bool step(const void* action, const Row& row) = 0;
};

using Make = std::function<std::unique_ptr<Environment>()>;

struct Options {
  std::string address;    // host:port of the learner
  std::string security;   // folder of certificates and tokens (murmur certs); empty: none
  uint32_t envs = 32;     // of a session
  uint32_t sessions = 2;  // while one waits for actions, another one steps
  uint32_t evaluate = 0;  // episodes of an evaluation; 0: train
  Options(int count, char** words) : address(count > 1 ? words[1] : "") {
    if (count < 2 || count % 2) throw std::runtime_error("usage: HOST:PORT [--OPTION VALUE] ...");
    for (int i = 2; i < count; i += 2) {
      const std::string name = words[i], value = words[i + 1];
      if (name == "--security") security = value;
      else if (name == "--envs") envs = std::stoul(value);
      else if (name == "--sessions") sessions = std::stoul(value);
      else if (name == "--evaluate") evaluate = std::stoul(value), sessions = 1;
      else throw std::runtime_error("no option " + name);
    }
  }
};

inline std::atomic<bool> stopping{false};  // lock-free: a signal handler sets it
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

// The finalizer of splitmix64.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// The seed of an episode, as shared/wire/seeding.py defines it.
inline uint64_t episode_seed(uint64_t run_seed, uint64_t slot, uint64_t episode) {
  for (uint64_t part : {slot, episode}) run_seed = mix((run_seed + GOLDEN) ^ mix(part + GOLDEN));
  return run_seed >> 1;
}

// TLS with a token if there is a security folder, else plain text.
inline std::shared_ptr<grpc::ChannelCredentials> credentials(const std::string& folder) {
  if (folder.empty()) return grpc::InsecureChannelCredentials();
  const auto contents = [&](const std::string& name) {
    std::ifstream file(folder + "/" + name);
    if (!file) throw std::runtime_error("cannot read " + folder + "/" + name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::istringstream lines(contents("tokens"));
  for (std::string line, role, token; std::getline(lines, line);)
    if (std::istringstream(line) >> role >> token && role == "environment")
      return grpc::CompositeChannelCredentials(
          grpc::SslCredentials({contents("ca.pem"), contents("key.pem"), contents("certificate.pem")}),
          grpc::AccessTokenCredentials(token));
  throw std::runtime_error(folder + "/tokens holds no token for the role environment");
}

// One session: its environments, and one stream to the learner after another. Used by one thread.
class Session {
 public:
  Session(const Options& options, const pb::EnvSpec& spec, const Make& make, uint32_t number)
      : options_(options), n_(options.envs), types_(n_), episodes_(n_), played_(n_) {
    hello_.set_protocol_version(pb::PROTOCOL_VERSION);
    hello_.set_worker_id("cpp/" + std::to_string(number));  // its name in the learner's log
    hello_.set_mode(options.evaluate ? pb::MODE_EVALUATE : pb::MODE_TRAIN);
    hello_.set_episodes(options.evaluate);
    hello_.set_num_envs(n_);
    hello_.set_preferred_first_slot(number * n_);  // stable slots repeat a run
    *hello_.mutable_spec() = spec;

    const size_t agents = spec.num_agents();
    const auto& kind = spec.action();
    if (!kind.has_discrete() && !kind.has_continuous())
      throw std::runtime_error("action: discrete or continuous; composite ones are not written here");
    action_bytes_ = 4 * agents * (kind.has_discrete() ? 1 : kind.continuous().size());
    const auto add = [&](size_t row_bytes, bool blank = false) {
      arrays_.push_back({std::vector<char>(n_ * row_bytes), row_bytes, blank});
    };
    add(4 * agents);  // reward
    add(4);           // discount
    for (const auto& array : spec.observations()) {
      size_t bytes = array.dtype() == "uint8" ? 1 : array.dtype() == "float16" ? 2 : 4;
      for (uint32_t size : array.shape()) bytes *= size;
      add(array.per_agent() ? bytes * agents : bytes, array.name() == "action_mask");
    }
    for (int i = 0; i < spec.metrics_size(); ++i) add(4);
    for (uint32_t i = 0; i < n_; ++i) {
      environments_.push_back(make());
      rows_.push_back({{}, 2u + spec.observations_size()});
      for (Array& array : arrays_) rows_[i].arrays.push_back(array.row(i));
    }

    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);  // notices a learner that hangs
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5'000);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    arguments.SetMaxReceiveMessageSize(256 << 20);
    stub_ = std::make_unique<Stub>(
        grpc::CreateCustomChannel(options.address, credentials(options.security), arguments));
  }

  // Plays until it is told to stop (returns 0) or cannot go on (2).
  int run() {
    std::mt19937 random(std::random_device{}());
    std::uniform_real_distribution<double> jitter(0.5, 1);
    auto seen = Clock::now();
    for (Seconds pause{0.1}; !stopping;) {
      const grpc::Status status = play();
      if (!broken_.empty()) return fail("the learner broke the contract: it sent " + broken_);
      if (FOR_GOOD.count(status.error_code())) return fail("refused: " + status.error_message());
      if (welcomed_ || status.error_code() != grpc::UNAVAILABLE) seen = Clock::now();
      if (Clock::now() - seen > std::chrono::minutes(5))
        return fail("no learner at " + options_.address + ": " + status.error_message());
      pause = welcomed_ ? Seconds{0.2} : std::min(2 * pause, Seconds{5});
      for (auto end = Clock::now() + pause * jitter(random); !stopping && Clock::now() < end;)
        std::this_thread::sleep_for(Seconds{0.02});
    }
    return 0;
  }

 private:
  using Stub = grpc::TemplatedGenericStub<pb::WorkerMessage, grpc::ByteBuffer>;
  static constexpr size_t PART_BYTES = 1 << 20;
  inline static const std::set<int> FOR_GOOD{grpc::FAILED_PRECONDITION, grpc::INVALID_ARGUMENT,
                                             grpc::UNAUTHENTICATED, grpc::PERMISSION_DENIED,
                                             grpc::UNIMPLEMENTED};

  struct Array {
    std::vector<char> bytes;  // [n, row_bytes], little-endian as this machine
    size_t row_bytes;
    bool blank;  // every byte of an ABORTED row
    char* row(uint32_t i) { return bytes.data() + i * row_bytes; }
  };

  int fail(const std::string& why) const {
    std::cerr << hello_.worker_id() + ": " + why + "\n";
    return 2;
  }

  // Plays one stream to its end; returns the status that the learner gave it.
  grpc::Status play() {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    grpc::Status status;
    context_ = &context, queue_ = &queue;
    stream_ = stub_->PrepareCall(&context, "/murmur.v1.Rollout/Play", &queue);
    stream_->StartCall(this);
    done();
    *message_.mutable_hello() = hello_;
    stream_->Write(message_, this);
    welcomed_ = done() && read(pb::LearnerMessage::kWelcome) && start(answer_.welcome());
    for (uint64_t sequence = 1; welcomed_ && send(sequence); ++sequence)
      if (!read(pb::LearnerMessage::kAction) || !take(answer_.action(), sequence)) break;
    stream_->WritesDone(this);  // the half-close
    done();
    stream_->Finish(&status, this);
    done();
    return status;
  }

  // Waits for the operation just begun; false: the stream has ended.
  bool done() {
    void* tag;
    bool ok = false;
    const auto soon = [] { return std::chrono::system_clock::now() + std::chrono::milliseconds(100); };
    for (int waits = 0; queue_->AsyncNext(&tag, &ok, soon()) != grpc::CompletionQueue::GOT_EVENT;)
      if (stopping && ++waits == 20) context_->TryCancel();  // no answer within 2 s
    return ok;
  }

  bool broken(const std::string& what) {
    broken_ = what;
    context_->TryCancel();
    return false;
  }

  bool read(pb::LearnerMessage::MessageCase wanted) {
    grpc::ByteBuffer bytes;
    stream_->Read(&bytes, this);
    if (!done()) return false;
    if (!grpc::SerializationTraits<pb::LearnerMessage>::Deserialize(&bytes, &answer_).ok())
      return broken("bytes that are no message");
    return answer_.message_case() == wanted || broken("a message that is not due");
  }

  // Sends the time steps of all environments, in parts.
  bool send(uint64_t sequence) {
    bytes_.clear();
    for (const Array& array : arrays_) bytes_.append(array.bytes.data(), array.bytes.size());
    bytes_.append(reinterpret_cast<const char*>(types_.data()), n_);
    pb::Observation& observation = *message_.mutable_observation();
    observation.set_sequence(sequence);
    for (size_t part = 0; part * PART_BYTES < bytes_.size(); ++part) {
      observation.set_part(part);
      observation.set_arrays(bytes_.substr(part * PART_BYTES, PART_BYTES));
      stream_->Write(message_, this);
      if (!done()) return false;
    }
    return true;
  }

  // Brings every environment to where the learner has it.
  bool start(const pb::Welcome& welcome) {
    if (!options_.evaluate && welcome.slots_size() != int(n_))
      return broken("a Welcome for another number of environments");
    run_seed_ = welcome.run_seed(), first_slot_ = welcome.first_slot();
    for (uint32_t i = 0; i < n_; ++i) {
      const pb::SlotStart slot = options_.evaluate ? pb::SlotStart() : welcome.slots(i);
      const std::string& actions = slot.actions();
      if (actions.size() % action_bytes_) return broken("a part of an action in Welcome");
      episodes_[i] = options_.evaluate ? i : slot.episode(), played_[i] = 0;
      begin(i);
      for (size_t at = 0; at < actions.size(); at += action_bytes_) advance(i, &actions[at]);
    }
    return true;
  }

  // Steps all environments by the learner's answer; false if the stream is to end.
  bool take(const pb::Action& action, uint64_t sequence) {
    if (action.sequence() != sequence) return broken("an answer to another message");
    if (action.arrays().size() != n_ * action_bytes_) return broken("actions of another size");
    bool evaluated = options_.evaluate > 0;
    for (uint32_t i = 0; i < n_; ++i) evaluated &= i + n_ * played_[i] >= options_.evaluate;
    if (stopping || evaluated) return false;
    for (uint32_t i = 0; i < n_; ++i) advance(i, &action.arrays()[i * action_bytes_]);
    return true;
  }

  // Begins the episode whose turn it is.
  void begin(uint32_t i) {
    const uint64_t episode = episodes_[i];
    const uint64_t seed =
        options_.evaluate ? 1001 + episode : episode_seed(run_seed_, first_slot_ + i, episode);
    guarded(i, [&] { return environments_[i]->begin(seed, rows_[i]), FIRST; });
  }

  // Takes one step; after LAST and ABORTED the next episode begins, whatever the action.
  void advance(uint32_t i, const char* action) {
    if (types_[i] == LAST || types_[i] == ABORTED) {
      episodes_[i] += options_.evaluate ? n_ : 1;
      return begin(i);
    }
    guarded(i, [&] { return environments_[i]->step(action, rows_[i]) ? LAST : MID; });
    played_[i] += types_[i] == LAST;
  }

  // Calls an environment; an exception makes an ABORTED row.
  template <class Call>
  void guarded(uint32_t i, const Call& call) {
    std::memset(rows_[i].reward(), 0, arrays_[0].row_bytes);
    rows_[i].discount() = 1;
    try {
      types_[i] = call();
    } catch (const std::exception& error) {
      fail("episode " + std::to_string(episodes_[i]) + " failed: " + error.what());
      for (Array& array : arrays_) std::memset(array.row(i), array.blank, array.row_bytes);
      rows_[i].discount() = 1;
      types_[i] = ABORTED;
    }
  }

  const Options options_;
  const uint32_t n_;
  pb::Hello hello_;
  size_t action_bytes_;  // of one environment
  std::vector<std::unique_ptr<Environment>> environments_;
  std::vector<Array> arrays_;  // in the order of the wire, without the step types
  std::vector<Row> rows_;
  std::vector<StepType> types_;
  std::vector<uint64_t> episodes_, played_;  // number of the one under way; count of those ended
  uint64_t run_seed_ = 0, first_slot_ = 0;
  bool welcomed_ = false;
  std::string broken_, bytes_;
  pb::WorkerMessage message_;
  pb::LearnerMessage answer_;
  std::unique_ptr<Stub> stub_;
  grpc::ClientContext* context_;  // of the stream under way, as the next two
  grpc::CompletionQueue* queue_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<pb::WorkerMessage, grpc::ByteBuffer>> stream_;
};

// Plays all sessions, of an EnvSpec in text form, until SIGTERM or Ctrl-C; returns the exit code.
inline int serve(const Options& options, const std::string& text, const Make& make) {
  pb::EnvSpec spec;
  if (!google::protobuf::TextFormat::ParseFromString(text, &spec))
    throw std::runtime_error("the spec is no EnvSpec in text form");
  for (int number : {SIGTERM, SIGINT}) std::signal(number, [](int) { stopping = true; });
  std::vector<std::unique_ptr<Session>> sessions;
  for (uint32_t number = 0; number < options.sessions; ++number)
    sessions.push_back(std::make_unique<Session>(options, spec, make, number));
  std::atomic<int> code{0};
  std::vector<std::thread> threads;
  for (auto& session : sessions)
    threads.emplace_back([&] { if (session->run()) code = 2, stopping = true; });
  for (auto& thread : threads) thread.join();
  return code;
}

}  // namespace murmur
