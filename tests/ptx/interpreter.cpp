// Executes decoded PTX on host memory, one kernel launch per call of run_kernel().
//
// A warp is 32 lanes. Lanes that have branched apart run from the lowest program counter on until they meet again.
// Warps of several resident blocks take turns of random length in random order. Every access to memory is checked:
// bounds, alignment, shared memory that nobody has written, and data races, that is two accesses to one place, at
// least one of them a write, that no barrier and no atomic operation puts in order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 32;
constexpr u32 kAllLanes = ~0u;

// Reinterpret the low bytes of a register.
template <class T>
T as(u64 bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
u64 bits_of(T value) {
  u64 bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

// PTX returns the operand that is a number, and orders -0 below +0.
template <class T>
T maximum(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
template <class T>
T minimum(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

// Numbers too small for full precision become 0 in instructions with the suffix ftz.
float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// Conversions to integers truncate and saturate. A NaN becomes 0 in 32 bits and the smallest number in 64 bits.
i64 int64_from(double x) {
  if (std::isnan(x) || x < -9223372036854775808.0) return std::numeric_limits<i64>::min();
  return x >= 9223372036854775808.0 ? std::numeric_limits<i64>::max() : static_cast<i64>(x);
}
i32 int32_from(double x) {
  if (std::isnan(x)) return 0;
  return static_cast<i32>(std::clamp(std::trunc(x), -2147483648.0, 2147483647.0));
}

float from_bfloat16(u16 half) { return as<float>(static_cast<u64>(half) << 16); }
u16 to_bfloat16(float x) {
  u32 bits = static_cast<u32>(bits_of(x));
  if (std::isnan(x)) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_float16(u16 half) { return static_cast<float>(as<_Float16>(half)); }
u16 to_float16(float x) { return as<u16>(bits_of(static_cast<_Float16>(x))); }

// kUnordered is added to comparisons that are true if an operand is NaN.
enum Comparison { kEq, kNe, kLt, kLe, kGt, kGe, kUnordered, kIsNan = 2 * kUnordered, kIsNumber };
template <class T>
bool compare(int how, T a, T b) {
  switch (how % kUnordered) {
    case kEq: return a == b;
    case kNe: return a != b;
    case kLt: return a < b;
    case kLe: return a <= b;
    case kGt: return a > b;
    default: return a >= b;
  }
}
template <class T>
bool compare_floats(int how, T a, T b) {
  bool is_nan = std::isnan(a) || std::isnan(b);
  if (how >= kIsNan) return is_nan == (how == kIsNan);
  return is_nan ? how >= kUnordered : compare(how, a, b);
}

// Instructions with one result per lane, computed from the operands of that lane. The columns are the name, the type of
// the result, the type of the operands, and the result.
#define LANE_INSTRUCTIONS(X)                                                                                          \
  X(mov, u64, u64, a) X(mov_16, u16, u16, a) X(mov_32, u32, u32, a)                                                    \
  X(add_32, u32, u32, a + b) X(add_64, u64, u64, a + b) X(add_16, u16, u16, a + b)                                     \
  X(sub_32, u32, u32, a - b) X(sub_64, u64, u64, a - b) X(sub_16, u16, u16, a - b)                                     \
  X(mul_32, u32, u32, a * b) X(mul_64, u64, u64, a * b) X(mul_wide_s32, i64, i32, i64(a) * b)                          \
  X(mul_wide_u32, u64, u32, u64(a) * b) X(mad_32, u32, u32, a * b + c)                                                 \
  X(mul_hi_u32, u32, u32, u32(u64(a) * b >> 32)) X(mul_hi_s32, i32, i32, i32(i64(a) * b >> 32))                        \
  X(div_s32, i32, i32, a / b) X(div_u32, u32, u32, a / b) X(div_s64, i64, i64, a / b) X(div_u64, u64, u64, a / b)      \
  X(rem_s32, i32, i32, a % b) X(rem_u32, u32, u32, a % b) X(rem_s64, i64, i64, a % b) X(rem_u64, u64, u64, a % b)      \
  X(neg_32, u32, u32, 0 - a) X(neg_64, u64, u64, 0 - a)                                                                \
  X(not_16, u16, u16, ~a) X(not_32, u32, u32, ~a) X(not_64, u64, u64, ~a) X(not_pred, u8, u8, !(a & 1))                \
  X(and_64, u64, u64, a & b) X(or_64, u64, u64, a | b) X(xor_64, u64, u64, a ^ b)                                      \
  X(shl_16, u16, u16, b > 15 ? 0 : a << b) X(shl_32, u32, u32, b > 31 ? 0 : a << b)                                    \
  X(shr_u16, u16, u16, b > 15 ? 0 : a >> b) X(shr_s16, i16, i16, a >> std::min<u16>(b, 15))                            \
  X(shr_u32, u32, u32, b > 31 ? 0 : a >> b) X(shr_s32, i32, i32, a >> std::min<u32>(b, 31))                            \
  X(shl_64, u64, u64, u32(b) > 63 ? 0 : a << u32(b)) X(shr_u64, u64, u64, u32(b) > 63 ? 0 : a >> u32(b))               \
  X(shr_s64, i64, i64, a >> std::min<u32>(u32(b), 63))                                                                 \
  X(bfe_u32, u32, u32, u32(u64(a) >> (b & 255) & ((u64(1) << std::min<u32>(c & 255, 32)) - 1)))                        \
  X(min_s32, i32, i32, std::min(a, b)) X(max_s32, i32, i32, std::max(a, b))                                            \
  X(min_u32, u32, u32, std::min(a, b)) X(max_u32, u32, u32, std::max(a, b))                                            \
  X(min_s64, i64, i64, std::min(a, b)) X(max_s64, i64, i64, std::max(a, b))                                            \
  X(abs_s32, i32, i32, std::abs(a)) X(popc_32, u32, u32, u32(__builtin_popcount(a)))                                   \
  X(add_f32, float, float, a + b) X(add_f64, double, double, a + b)                                                    \
  X(sub_f32, float, float, a - b) X(sub_f64, double, double, a - b)                                                    \
  X(mul_f32, float, float, a * b) X(mul_f64, double, double, a * b)                                                    \
  X(div_f32, float, float, a / b) X(div_f64, double, double, a / b)                                                    \
  X(div_ftz_f32, float, float, flush(flush(a) / flush(b)))                                                             \
  X(fma_f32, float, float, std::fma(a, b, c)) X(fma_f64, double, double, std::fma(a, b, c))                            \
  X(min_f32, float, float, minimum(a, b)) X(min_f64, double, double, minimum(a, b))                                    \
  X(max_f32, float, float, maximum(a, b)) X(max_f64, double, double, maximum(a, b))                                    \
  X(abs_f32, float, float, std::fabs(a)) X(abs_f64, double, double, std::fabs(a))                                      \
  X(neg_f32, float, float, -a) X(neg_f64, double, double, -a)                                                          \
  X(zero_extend_8, u64, u8, a) X(zero_extend_16, u64, u16, a) X(zero_extend_32, u64, u32, a)                           \
  X(sign_extend_8, i64, int8_t, a) X(sign_extend_16, i64, i16, a) X(sign_extend_32, i64, i32, a)                       \
  X(f64_from_f32, double, float, a) X(f32_from_f64, float, double, float(a))                                           \
  X(f32_from_s32, float, i32, float(a)) X(f32_from_u32, float, u32, float(a)) X(f32_from_s64, float, i64, float(a))    \
  X(f64_from_s32, double, i32, a) X(f64_from_u32, double, u32, a) X(f64_from_s64, double, i64, double(a))              \
  X(s64_from_f32, i64, float, int64_from(a)) X(s64_from_f64, i64, double, int64_from(a))                               \
  X(s32_from_f32, i32, float, int32_from(a)) X(s32_from_f64, i32, double, int32_from(a))                               \
  X(f32_from_bf16, float, u16, from_bfloat16(a)) X(f32_from_f16, float, u16, from_float16(a))                          \
  X(bf16_from_f32, u16, float, to_bfloat16(a)) X(f16_from_f32, u16, float, to_float16(a))                              \
  X(bf16x2_from_f32, u32, float, u32(to_bfloat16(a)) << 16 | to_bfloat16(b))                                           \
  X(f16x2_from_f32, u32, float, u32(to_float16(a)) << 16 | to_float16(b))                                              \
  X(fma_bf16, u16, u16, to_bfloat16(std::fma(from_bfloat16(a), from_bfloat16(b), from_bfloat16(c))))                   \
  X(abs_f16, u16, u16, a & 0x7fff) X(abs_bf16, u16, u16, a & 0x7fff) X(abs_f16x2, u32, u32, a & 0x7fff7fff)             \
  X(neg_f16, u16, u16, a ^ 0x8000)                \
  X(add_f16, u16, u16, to_float16(from_float16(a) + from_float16(b)))                                                  \
  X(mul_f16, u16, u16, to_float16(from_float16(a) * from_float16(b)))                                                  \
  X(pack_16, u32, u16, u32(b) << 16 | a) X(pack_32, u64, u32, u64(b) << 32 | a)

// The other instructions.
#define WARP_INSTRUCTIONS(X)                                                                                          \
  X(nop) X(ret) X(branch) X(barrier) X(load_parameter) X(thread_id) X(block_id) X(block_count)                         \
  X(load_global) X(store_global) X(load_shared) X(store_shared) X(load_matrix)                                         \
  X(atomic_add) X(atomic_max) X(atomic_min) X(atomic_or) X(atomic_exchange)                                            \
  X(select) X(permute) X(unpack_16) X(unpack_32)                                                                       \
  X(compare_s32) X(compare_u32) X(compare_s64) X(compare_u64) X(compare_s16) X(compare_u16) X(compare_f32)             \
  X(compare_f64) X(compare_f16) X(compare_bf16)                                                                                                       \
  X(shuffle_bfly) X(shuffle_up) X(shuffle_down) X(shuffle_idx) X(vote_ballot)                                          \
  X(reduce_add) X(reduce_max_s) X(reduce_min_s) X(reduce_max_u) X(reduce_min_u) X(reduce_or) X(reduce_and)

enum Operation : i32 {
#define ENUMERATE_LANE(name, ...) k_##name,
#define ENUMERATE_WARP(name) k_##name,
  LANE_INSTRUCTIONS(ENUMERATE_LANE) WARP_INSTRUCTIONS(ENUMERATE_WARP) kOperations
};
const char* const kNames[] = {
#define NAME_LANE(name, ...) #name,
#define NAME_WARP(name) #name,
    LANE_INSTRUCTIONS(NAME_LANE) WARP_INSTRUCTIONS(NAME_WARP)};

// The three structures below mirror those of program.py.
struct Instruction {
  i32 operation;
  i32 guard;  // predicate register, or -1
  i32 guard_value;
  i32 results, operands;
  i32 result[8];
  i32 operand[10];
  i32 width;  // bytes of an access, or the kind of a comparison
  i32 count;  // numbers per lane of a vector access
  i32 line;   // of the PTX
  i64 immediate;
};
struct Array {
  u64 start, bytes, item;  // item: bytes per entry
  i64 loaded, stored;      // bytes, counted here
};
struct Launch {
  const Instruction* code;
  i64 instructions;
  const u64* constants;  // the registers from ``registers`` on
  i64 constant_count, registers;
  const u64* parameters;
  i64 blocks, warps, shared_bytes;
  u64 seed;
  i64 resident;
  Array* arrays;
  i64 array_count;
  i64 steps, atomics, races;
  char message[512];
};

struct Failure {
  std::string message;
};

// Who has touched one place in memory. An epoch is the number of barriers that a block has passed.
struct Touch {
  i32 write_block = -1, write_warp = 0, read_block = -1, read_warp = 0;
  u32 write_epoch = 0, read_epoch = 0;
  u64 write_step = 0;
  bool write_atomic = false, several_read_blocks = false, several_read_warps = false;
};

struct Warp {
  std::vector<u64> registers;
  i64 next[kLanes] = {};  // program counters
  u32 alive = kAllLanes;
  bool together = true, waiting = false;
  u32 epoch = 0;
  int number = 0;
};

struct Block {
  i64 number = 0;
  std::vector<u8> shared;
  std::vector<Touch> touched;
  std::vector<Warp> warps;
};

class Machine {
 public:
  explicit Machine(Launch& launch) : launch_(launch), random_(launch.seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull) {
    for (i64 k = 0; k < launch.array_count; ++k) touched_.emplace_back(launch.arrays[k].bytes / launch.arrays[k].item + 1);
  }

  void run() {
    std::vector<i64> order(launch_.blocks);
    for (i64 k = 0; k < launch_.blocks; ++k) order[k] = k;
    for (i64 k = launch_.blocks - 1; k > 0; --k) std::swap(order[k], order[draw() % (k + 1)]);
    std::vector<std::unique_ptr<Block>> live;
    for (size_t started = 0; started < order.size() || !live.empty();) {
      while (started < order.size() && static_cast<i64>(live.size()) < launch_.resident) live.push_back(start(order[started++]));
      size_t chosen = draw() % live.size();
      if (!take_turn(*live[chosen])) live.erase(live.begin() + chosen);
    }
  }

 private:
  u64 draw() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

  std::unique_ptr<Block> start(i64 number) {
    auto block = std::make_unique<Block>();
    block->number = number;
    block->shared.assign(launch_.shared_bytes, 0xCD);
    block->touched.resize(launch_.shared_bytes);
    block->warps.resize(launch_.warps);
    for (int k = 0; k < launch_.warps; ++k) {
      Warp& warp = block->warps[k];
      warp.number = k;
      warp.registers.assign((launch_.registers + launch_.constant_count) * kLanes, 0xDEADBEEFDEADBEEFull);
      for (i64 c = 0; c < launch_.constant_count; ++c)
        std::fill_n(&warp.registers[(launch_.registers + c) * kLanes], kLanes, launch_.constants[c]);
    }
    return block;
  }

  // Run one warp for a while; return false if the block has ended.
  bool take_turn(Block& block) {
    std::vector<Warp*> ready;
    int waiting = 0;
    for (Warp& warp : block.warps) {
      if (warp.alive && !warp.waiting) ready.push_back(&warp);
      waiting += warp.waiting;
    }
    if (ready.empty()) {
      if (waiting == 0) return false;
      if (waiting < launch_.warps) throw Failure{"some warps wait at a barrier, others have ended"};
      for (Warp& warp : block.warps) {
        warp.waiting = false;
        ++warp.epoch;
      }
      return true;
    }
    Warp& warp = *ready[draw() % ready.size()];
    for (i64 left = 1 + draw() % 200; left > 0 && warp.alive && !warp.waiting; --left) step(block, warp);
    return true;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Failure{what + " in block " + std::to_string(block_) + ", line " + std::to_string(line_)};
  }

  void report_race(const char* space, const char* what, i64 other_block, int other_warp) {
    if (launch_.races++ == 0)
      std::snprintf(launch_.message, sizeof launch_.message, "race in %s memory: %s by block %lld warp %d and block %lld warp %d, line %d",
                    space, what, static_cast<long long>(other_block), other_warp, static_cast<long long>(block_), warp_->number, line_);
  }

  // Record an access and look for races with earlier ones. ``same`` says that a write leaves the memory as it is.
  void touch(Touch& at, const char* space, bool write, bool atomic, bool same) {
    i32 block = static_cast<i32>(block_);
    int warp = warp_->number;
    u32 epoch = warp_->epoch;
    if (at.write_block >= 0 && !(atomic && at.write_atomic) && !(write && same)) {
      bool other = at.write_block != block || (at.write_epoch == epoch && at.write_warp != warp) || (write && at.write_step == step_);
      if (other) report_race(space, write ? "two writes" : "a write and a read", at.write_block, at.write_warp);
    }
    if (write) {
      bool other = at.read_block >= 0 && (at.read_block != block || at.several_read_blocks ||
                                          (at.read_epoch == epoch && (at.read_warp != warp || at.several_read_warps)));
      if (other) report_race(space, "a read and a write", at.read_block, at.read_warp);
      at.write_block = block, at.write_warp = warp, at.write_epoch = epoch, at.write_atomic = atomic, at.write_step = step_;
      return;
    }
    if (at.read_block >= 0 && at.read_block != block) at.several_read_blocks = true;
    if (at.read_block == block && at.read_epoch == epoch && at.read_warp != warp) at.several_read_warps = true;
    if (at.read_block != block || at.read_epoch != epoch) at.several_read_warps = false;
    at.read_block = block, at.read_warp = warp, at.read_epoch = epoch;
  }

  void access_global(u64 address, int bytes, bool write, bool atomic, const void* value) {
    for (i64 k = 0; k < launch_.array_count; ++k) {
      Array& array = launch_.arrays[k];
      if (address < array.start || address + bytes > array.start + array.bytes) continue;
      (write ? array.stored : array.loaded) += bytes;
      bool same = write && !atomic && std::memcmp(value, reinterpret_cast<void*>(address), bytes) == 0;
      u64 first = (address - array.start) / array.item, last = (address + bytes - 1 - array.start) / array.item;
      for (u64 item = first; item <= last; ++item) touch(touched_[k][item], "global", write, atomic, same);
      return;
    }
    fail(write ? "write out of bounds" : "read out of bounds");
  }

  void access_shared(Block& block, u64 address, int bytes, bool write, const void* value) {
    if (address + bytes > block.shared.size()) fail("shared memory out of bounds");
    bool same = write && std::memcmp(value, &block.shared[address], bytes) == 0;
    for (int k = 0; k < bytes; ++k) {
      Touch& at = block.touched[address + k];
      if (!write && at.write_block < 0) fail("read of shared memory that nobody has written");
      touch(at, "shared", write, false, same);
    }
  }

  void check_alignment(u64 address, u64 bytes) const {
    if (address % bytes) fail("address not aligned to " + std::to_string(bytes) + " bytes");
  }

  u64 update(const Instruction& instruction, u64 address, u64 operand) {
    access_global(address, instruction.width, true, true, nullptr);
    ++launch_.atomics;
    u64 old = 0;
    std::memcpy(&old, reinterpret_cast<void*>(address), instruction.width);
    bool narrow = instruction.width == 4;
    i64 signed_old = narrow ? i64(i32(old)) : i64(old), signed_operand = narrow ? i64(i32(operand)) : i64(operand);
    u64 updated = operand;
    if (instruction.operation == k_atomic_add) updated = old + operand;
    if (instruction.operation == k_atomic_max) updated = u64(std::max(signed_old, signed_operand));
    if (instruction.operation == k_atomic_min) updated = u64(std::min(signed_old, signed_operand));
    if (instruction.operation == k_atomic_or) updated = old | operand;
    std::memcpy(reinterpret_cast<void*>(address), &updated, instruction.width);
    return old;
  }

  void step(Block& block, Warp& warp) {
    // The lanes that take part: those at the lowest program counter.
    i64 at = std::numeric_limits<i64>::max();
    u32 present = 0;
    if (warp.together) {
      at = warp.next[__builtin_ctz(warp.alive)];
      present = warp.alive;
    } else {
      for (int lane = 0; lane < kLanes; ++lane)
        if (warp.alive >> lane & 1) at = std::min(at, warp.next[lane]);
      for (int lane = 0; lane < kLanes; ++lane)
        if ((warp.alive >> lane & 1) && warp.next[lane] == at) present |= 1u << lane;
      warp.together = present == warp.alive;
    }
    if (at >= launch_.instructions) throw Failure{"execution ran past the last instruction"};
    const Instruction& instruction = launch_.code[at];
    block_ = block.number, warp_ = &warp, line_ = instruction.line;
    step_ = ++launch_.steps;
    auto row = [&](i32 number) { return &warp.registers[static_cast<u64>(number) * kLanes]; };
    u32 active = present;
    if (instruction.guard >= 0) {
      const u64* guard = row(instruction.guard);
      for (int lane = 0; lane < kLanes; ++lane)
        if ((guard[lane] & 1) != static_cast<u64>(instruction.guard_value)) active &= ~(1u << lane);
    }
    u64* d = instruction.results ? row(instruction.result[0]) : nullptr;
    const u64* s0 = instruction.operands > 0 ? row(instruction.operand[0]) : nullptr;
    const u64* s1 = instruction.operands > 1 ? row(instruction.operand[1]) : s0;
    const u64* s2 = instruction.operands > 2 ? row(instruction.operand[2]) : s0;
    auto go_on = [&](u32 lanes, i64 target) {
      for (int lane = 0; lane < kLanes; ++lane)
        if (lanes >> lane & 1) warp.next[lane] = target;
    };
    auto whole_warp = [&] {
      if (active != kAllLanes) fail(std::string("not all lanes take part in ") + kNames[instruction.operation]);
    };
#define EACH                               \
  for (int lane = 0; lane < kLanes; ++lane) \
    if (active >> lane & 1)
    switch (instruction.operation) {
#define LANE_CASE(name, R, A, result)                                         \
  case k_##name:                                                              \
    EACH {                                                                    \
      [[maybe_unused]] A a = as<A>(s0[lane]), b = as<A>(s1[lane]), c = as<A>(s2[lane]); \
      d[lane] = bits_of<R>(static_cast<R>(result));                           \
    }                                                                         \
    break;
      LANE_INSTRUCTIONS(LANE_CASE)
      case k_nop: break;
      case k_ret:
        warp.alive &= ~active;
        go_on(present & ~active, at + 1);
        if (warp.alive && present != active) warp.together = warp.alive == (present & ~active);
        return;
      case k_branch:
        go_on(active, instruction.immediate);
        go_on(present & ~active, at + 1);
        if (active && active != present) warp.together = false;
        return;
      case k_barrier:
        if (present != kAllLanes || active != kAllLanes) fail("a barrier that not all lanes reach together");
        warp.waiting = true;
        break;
      case k_load_parameter:
        EACH {
          u64 value = launch_.parameters[instruction.immediate];
          d[lane] = instruction.width == 8 ? value : value & ((u64(1) << 8 * instruction.width) - 1);
        }
        break;
      case k_thread_id: EACH d[lane] = warp.number * kLanes + lane; break;
      case k_block_id: EACH d[lane] = block.number; break;
      case k_block_count: EACH d[lane] = launch_.blocks; break;
      case k_load_global:
        EACH {
          u64 address = s0[lane] + instruction.immediate;
          check_alignment(address, u64(instruction.width) * instruction.count);
          for (int k = 0; k < instruction.count; ++k, address += instruction.width) {
            access_global(address, instruction.width, false, false, nullptr);
            u64 value = 0;
            std::memcpy(&value, reinterpret_cast<void*>(address), instruction.width);
            row(instruction.result[k])[lane] = value;
          }
        }
        break;
      case k_store_global:
        EACH {
          u64 address = s0[lane] + instruction.immediate;
          check_alignment(address, u64(instruction.width) * instruction.count);
          for (int k = 0; k < instruction.count; ++k, address += instruction.width) {
            const u64* value = &row(instruction.operand[1 + k])[lane];
            access_global(address, instruction.width, true, false, value);
            std::memcpy(reinterpret_cast<void*>(address), value, instruction.width);
          }
        }
        break;
      case k_load_shared:
        EACH {
          u64 address = static_cast<u32>(s0[lane]) + instruction.immediate;
          check_alignment(address, u64(instruction.width) * instruction.count);
          for (int k = 0; k < instruction.count; ++k, address += instruction.width) {
            access_shared(block, address, instruction.width, false, nullptr);
            u64 value = 0;
            std::memcpy(&value, &block.shared[address], instruction.width);
            row(instruction.result[k])[lane] = value;
          }
        }
        break;
      case k_store_shared:
        EACH {
          u64 address = static_cast<u32>(s0[lane]) + instruction.immediate;
          check_alignment(address, u64(instruction.width) * instruction.count);
          for (int k = 0; k < instruction.count; ++k, address += instruction.width) {
            const u64* value = &row(instruction.operand[1 + k])[lane];
            access_shared(block, address, instruction.width, true, value);
            std::memcpy(&block.shared[address], value, instruction.width);
          }
        }
        break;
      case k_load_matrix: {  // 8 x 8 matrices of 16-bit numbers; lane k of each eight holds the address of row k
        whole_warp();
        u64 loaded[4][kLanes] = {};
        for (int k = 0; k < instruction.count; ++k)
          for (int lane = 0; lane < kLanes; ++lane) {
            u64 address = static_cast<u32>(s0[8 * k + lane / 4]) + instruction.immediate + lane % 4 * 4;
            access_shared(block, address, 4, false, nullptr);
            std::memcpy(&loaded[k][lane], &block.shared[address], 4);
          }
        for (int k = 0; k < instruction.count; ++k) std::copy_n(loaded[k], kLanes, row(instruction.result[k]));
        break;
      }
      case k_atomic_add: case k_atomic_max: case k_atomic_min: case k_atomic_or: case k_atomic_exchange:
        EACH {
          u64 address = s0[lane] + instruction.immediate;
          check_alignment(address, instruction.width);
          u64 old = update(instruction, address, s1[lane]);
          if (d) d[lane] = old;
        }
        break;
      case k_select: EACH d[lane] = s2[lane] & 1 ? s0[lane] : s1[lane]; break;
      case k_permute:
        EACH {
          u64 source = u64(u32(s1[lane])) << 32 | u32(s0[lane]), picked = 0;
          for (int k = 0; k < 4; ++k) {
            u32 selector = s2[lane] >> 4 * k & 15;
            u64 byte = source >> 8 * (selector & 7) & 255;
            picked |= (selector & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * k;
          }
          d[lane] = picked;
        }
        break;
      case k_unpack_16: case k_unpack_32: {
        int width = instruction.operation == k_unpack_16 ? 16 : 32;
        EACH {
          u64 value = s0[lane];
          for (int k = 0; k < instruction.results; ++k) row(instruction.result[k])[lane] = value >> k * width & ((u64(1) << width) - 1);
        }
        break;
      }
#define COMPARE_CASE(name, A, function)                                                                    \
  case k_compare_##name:                                                                                   \
    EACH d[lane] = function(instruction.width, as<A>(s0[lane]), as<A>(s1[lane]));                            \
    break;
      COMPARE_CASE(s32, i32, compare) COMPARE_CASE(u32, u32, compare) COMPARE_CASE(s64, i64, compare)
      COMPARE_CASE(u64, u64, compare) COMPARE_CASE(s16, i16, compare) COMPARE_CASE(u16, u16, compare)
      COMPARE_CASE(f32, float, compare_floats) COMPARE_CASE(f64, double, compare_floats)
      case k_compare_f16:
        EACH d[lane] = compare_floats(instruction.width, from_float16(as<u16>(s0[lane])), from_float16(as<u16>(s1[lane])));
        break;
      case k_compare_bf16:
        EACH d[lane] = compare_floats(instruction.width, from_bfloat16(as<u16>(s0[lane])), from_bfloat16(as<u16>(s1[lane])));
        break;
      case k_shuffle_bfly: case k_shuffle_up: case k_shuffle_down: case k_shuffle_idx: {
        whole_warp();
        u64 shuffled[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          int distance = s1[lane] & 31, clamp = s2[lane] & 31, segment = s2[lane] >> 8 & 31;
          int last = (lane & segment) | (clamp & ~segment), source = lane;
          bool inside = true;
          if (instruction.operation == k_shuffle_up) source = lane - distance, inside = source >= last;
          if (instruction.operation == k_shuffle_down) source = lane + distance, inside = source <= last;
          if (instruction.operation == k_shuffle_bfly) source = lane ^ distance, inside = source <= last;
          if (instruction.operation == k_shuffle_idx) source = (lane & segment) | (distance & ~segment), inside = source <= last;
          shuffled[lane] = u32(s0[inside ? source : lane]);
        }
        std::copy_n(shuffled, kLanes, d);
        break;
      }
      case k_vote_ballot: {
        whole_warp();
        u64 votes = 0;
        for (int lane = 0; lane < kLanes; ++lane) votes |= (s0[lane] & 1) << lane;
        std::fill_n(d, kLanes, votes);
        break;
      }
#define REDUCE_CASE(name, A, expression)                                            \
  case k_reduce_##name: {                                                           \
    whole_warp();                                                                   \
    A a = as<A>(s0[0]);                                                             \
    for (int lane = 1; lane < kLanes; ++lane) {                                     \
      A b = as<A>(s0[lane]);                                                        \
      a = expression;                                                               \
    }                                                                               \
    std::fill_n(d, kLanes, bits_of(a));                                             \
    break;                                                                          \
  }
      REDUCE_CASE(add, u32, a + b) REDUCE_CASE(or, u32, a | b) REDUCE_CASE(and, u32, a & b)
      REDUCE_CASE(max_s, i32, std::max(a, b)) REDUCE_CASE(min_s, i32, std::min(a, b))
      REDUCE_CASE(max_u, u32, std::max(a, b)) REDUCE_CASE(min_u, u32, std::min(a, b))
      default: fail("unknown instruction");
    }
    go_on(present, at + 1);
  }

  Launch& launch_;
  u64 random_;
  std::vector<std::vector<Touch>> touched_;  // per array and entry
  // Of the instruction that is being executed.
  i64 block_ = 0;
  const Warp* warp_ = nullptr;
  int line_ = 0;
  u64 step_ = 0;
};

}  // namespace

extern "C" const char* operation_name(i32 number) { return number < kOperations ? kNames[number] : nullptr; }

// Return 0, or 1 with a message if the kernel did something forbidden. Races are counted in the launch.
extern "C" int run_kernel(Launch* launch) {
  try {
    Machine(*launch).run();
    return 0;
  } catch (const Failure& failure) {
    std::snprintf(launch->message, sizeof launch->message, "%s", failure.message.c_str());
    return 1;
  }
}
