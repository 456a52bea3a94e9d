// CUDA emulation on the CPU, for tests: cuda_on_cpu.py includes this header before an unchanged .cu, g++ compiles both,
// and the kernel runs thread by thread. The threads of a block are fibers: each runs until it must wait for others at a
// barrier or a warp operation, so between two of those a thread is as far ahead of the others as possible. `order`
// selects which thread runs first. Blocks run one after another.
//
// Strictness: __shared__ memory starts as 0xA5 bytes, a value shuffled from a missing lane is 0xA5 bytes, and all lanes
// of a mask must reach the same operation with the same mask. Masks may name lanes missing from a partial last warp, as
// hardware allows, but not lanes that returned. For __syncthreads, returned threads count as arrived, as in hardware.
//
// Not supported: dynamic shared memory, two- and three-dimensional launches, waiting for another thread by polling
// memory, PTX, warps in lockstep, the GPU's NaN bits (0x7FFFFFFF from every operation) and its saturating conversions
// to integer.
#ifndef MXCLI_CUDA_ON_CPU_H
#define MXCLI_CUDA_ON_CPU_H

#include <link.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// ------------------------------------------------------------------------------------------------------------ keywords

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// g++ accepts alignas only at the start of a declaration, NVRTC also after __shared__.
#define alignas(...) __attribute__((aligned(__VA_ARGS__)))
// `used`: the poison is written from outside. thread_local: one memory region, whose bounds the loader knows, holds all
// shared variables, including those of templates; a named section does not (g++ 12 omits templates). The address
// sanitizer guards statics, but not thread_local variables.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static __attribute__((used))
#else
#define __shared__ static thread_local __attribute__((used))
#endif

#define CUDA_ON_CPU_VECTOR2(name, T, alignment)                   \
  struct __attribute__((aligned(alignment))) name##2 { T x, y; }; \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }
#define CUDA_ON_CPU_VECTOR3(name, T) \
  struct name##3 { T x, y, z; };     \
  static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }
#define CUDA_ON_CPU_VECTOR4(name, T, alignment)                         \
  struct __attribute__((aligned(alignment))) name##4 { T x, y, z, w; }; \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTOR2(char, signed char, 2)
CUDA_ON_CPU_VECTOR2(uchar, unsigned char, 2)
CUDA_ON_CPU_VECTOR2(short, short, 4)
CUDA_ON_CPU_VECTOR2(ushort, unsigned short, 4)
CUDA_ON_CPU_VECTOR2(int, int, 8)
CUDA_ON_CPU_VECTOR2(uint, unsigned, 8)
CUDA_ON_CPU_VECTOR2(float, float, 8)
CUDA_ON_CPU_VECTOR2(longlong, long long, 16)
CUDA_ON_CPU_VECTOR2(ulonglong, unsigned long long, 16)
CUDA_ON_CPU_VECTOR2(double, double, 16)
CUDA_ON_CPU_VECTOR3(int, int)
CUDA_ON_CPU_VECTOR3(uint, unsigned)
CUDA_ON_CPU_VECTOR3(float, float)
CUDA_ON_CPU_VECTOR4(char, signed char, 4)
CUDA_ON_CPU_VECTOR4(uchar, unsigned char, 4)
CUDA_ON_CPU_VECTOR4(short, short, 8)
CUDA_ON_CPU_VECTOR4(ushort, unsigned short, 8)
CUDA_ON_CPU_VECTOR4(int, int, 16)
CUDA_ON_CPU_VECTOR4(uint, unsigned, 16)
CUDA_ON_CPU_VECTOR4(float, float, 16)
typedef uint3 dim3;

// -------------------------------------------------------------------------------------------------------------- fibers

namespace cuda_on_cpu {

const unsigned LANES = 32, MOST_THREADS = 1024;
const size_t STACK_BYTES = 128 * 1024;
const unsigned char POISON = 0xA5;

#ifdef CUDA_ON_CPU_UCONTEXT
typedef ucontext_t Context;
static inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
static inline void start_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#else
// swapcontext makes a system call for the signal mask; saving the callee-saved registers suffices.
typedef void* Context;
extern "C" __attribute__((visibility("hidden"))) void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
    .text
    .type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
static inline void switch_context(Context& from, Context& to) { cuda_on_cpu_switch(&from, to); }
static inline void start_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = (void**)(stack + bytes);  // 16-byte aligned; at function entry, the stack pointer is 8 below that
  top[-1] = nullptr;                     // return address of `entry`, unused
  top[-2] = (void*)entry;
  for (int saved = 3; saved <= 8; ++saved) top[-saved] = nullptr;
  context = top - 8;
}
#endif

// ---------------------------------------------------------------------------------------------- operations and waiting

// The arguments of the lanes of a warp operation; `mask`: the participating lanes.
struct Brought {
  uint32_t mask;
  uint64_t value[LANES];
  int operand[LANES], width[LANES];
};
// A warp operation; `result` returns a lane's result.
struct WarpOperation {
  const char* name;
  uint64_t (*result)(const Brought& brought, int lane);
};
// A block operation; `result` returns all threads' result from the count of nonzero predicates.
struct BlockOperation {
  const char* name;
  int (*result)(unsigned nonzero, unsigned threads);
};

enum State { READY, WAITING, RETURNED };
struct Fiber {
  Context context;
  State state;
  const WarpOperation* warp_operation;    // what a waiting thread waits in,
  const BlockOperation* block_operation;  // if this is null; else this
  uint32_t mask;
  int bytes;  // size of the value: 32-bit and 64-bit shuffles do not match
  uint64_t value, result;
  int operand, width;
};

// Lanes waiting for one another.
struct Meeting {
  const WarpOperation* operation;
  uint32_t mask, arrived;
  int bytes;
};
struct Warp {
  uint32_t lanes;  // mask of existing lanes
  unsigned meeting_count;
  Meeting meetings[LANES];
};

struct Machine {
  Fiber fibers[MOST_THREADS];
  Warp warps[MOST_THREADS / LANES];
  Context scheduler;
  char* stacks;
  void (*call)(void**);
  void** arguments;
  const char* kernel;
  unsigned threads, running, current, block;
  const BlockOperation* barrier;
  unsigned at_barrier, nonzero;
  bool stopped;
  char message[2000];
};
static Machine machine;
static uint3 thread_index, block_index;
static dim3 block_size, grid_size;

// noipa: the compiler must assume that memory and threadIdx may change in the call.
__attribute__((noipa)) static void leave_to_scheduler() {
  switch_context(machine.fibers[machine.current].context, machine.scheduler);
}

static inline void add_text(const char* format, ...) {
  size_t length = strlen(machine.message);
  va_list values;
  va_start(values, format);
  vsnprintf(machine.message + length, sizeof machine.message - length, format, values);
  va_end(values);
}

// Stop the launch with a message; the calling fiber never continues.
__attribute__((noinline)) static void stop(const char* format, ...) {
  va_list values;
  va_start(values, format);
  snprintf(machine.message, sizeof machine.message, "kernel %s, block %u, thread %u: ", machine.kernel, machine.block,
           machine.current);
  size_t length = strlen(machine.message);
  vsnprintf(machine.message + length, sizeof machine.message - length, format, values);
  va_end(values);
  machine.stopped = true;
  leave_to_scheduler();
}

static inline void wait() {
  machine.fibers[machine.current].state = WAITING;
  leave_to_scheduler();
}

static inline void finish_meeting(unsigned first_thread, const Meeting& meeting) {
  Brought brought = {};
  brought.mask = meeting.arrived;
  for (unsigned lane = 0; lane < LANES; ++lane)
    if (meeting.arrived >> lane & 1) {
      const Fiber& fiber = machine.fibers[first_thread + lane];
      brought.value[lane] = fiber.value;
      brought.operand[lane] = fiber.operand;
      brought.width[lane] = fiber.width;
    } else {
      memset(&brought.value[lane], POISON, sizeof brought.value[lane]);
    }
  for (unsigned lane = 0; lane < LANES; ++lane)
    if (meeting.arrived >> lane & 1) {
      Fiber& fiber = machine.fibers[first_thread + lane];
      fiber.result = meeting.operation->result(brought, (int)lane);
      fiber.state = READY;
    }
}

// Exchange `value` with the other lanes of `mask`; return the operation's result for this lane.
__attribute__((noinline)) static uint64_t meet(const WarpOperation& operation, uint32_t mask, uint64_t value, int bytes,
                                               int operand = 0, int width = LANES) {
  unsigned thread = machine.current, lane = thread % LANES;
  Fiber& self = machine.fibers[thread];
  Warp& warp = machine.warps[thread / LANES];
  if (!(mask >> lane & 1)) stop("%s: mask 0x%08x does not contain the calling lane %u", operation.name, mask, lane);
  if (width < 1 || width > (int)LANES || (width & (width - 1)))
    stop("%s: width %d is not a power of two up to 32", operation.name, width);
  self.warp_operation = &operation;
  self.block_operation = nullptr;
  self.mask = mask;
  self.bytes = bytes;
  self.value = value;
  self.operand = operand;
  self.width = width;
  unsigned i = 0;
  while (i < warp.meeting_count && !(warp.meetings[i].operation == &operation && warp.meetings[i].mask == mask &&
                                     warp.meetings[i].bytes == bytes))
    ++i;
  if (i == warp.meeting_count) warp.meetings[warp.meeting_count++] = {&operation, mask, 0, bytes};
  Meeting& meeting = warp.meetings[i];
  meeting.arrived |= 1u << lane;
  if (meeting.arrived == (mask & warp.lanes)) {
    finish_meeting(thread - lane, meeting);
    meeting = warp.meetings[--warp.meeting_count];
  } else {
    wait();
  }
  return self.result;
}

static inline void open_barrier_if_complete() {
  if (machine.at_barrier == 0 || machine.at_barrier < machine.running) return;
  int result = machine.barrier->result(machine.nonzero, machine.at_barrier);
  for (unsigned i = 0; i < machine.threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    if (fiber.state != RETURNED) {
      fiber.result = (uint64_t)(int64_t)result;
      fiber.state = READY;
    }
  }
  machine.at_barrier = machine.nonzero = 0;
}

__attribute__((noinline)) static int meet_block(const BlockOperation& operation, int predicate) {
  Fiber& self = machine.fibers[machine.current];
  self.block_operation = &operation;
  if (machine.at_barrier == 0) machine.barrier = &operation;
  self.state = WAITING;
  if (machine.barrier == &operation) {  // otherwise this thread waits forever, which is reported
    machine.at_barrier += 1;
    machine.nonzero += predicate != 0;
    open_barrier_if_complete();
  }
  if (self.state == WAITING) leave_to_scheduler();
  return (int)self.result;
}

// ----------------------------------------------------------------------------------------------------- running a block

static void fiber_entry() {
  machine.call(machine.arguments);
  machine.fibers[machine.current].state = RETURNED;
  machine.running -= 1;
  open_barrier_if_complete();
  for (;;) leave_to_scheduler();
}

// Append the threads for which `is_meant(thread)`, as in "0-15, 17".
template <class IsMeant>
static void add_threads(IsMeant is_meant) {
  unsigned count = 0;
  for (unsigned first = 0; first < machine.threads; ++first) {
    if (!is_meant(first)) continue;
    unsigned last = first;
    while (last + 1 < machine.threads && is_meant(last + 1)) ++last;
    add_text(first == last ? "%s%u" : "%s%u-%u", count ? ", " : "", first, last);
    ++count;
    first = last;
  }
}

static inline bool wait_together(unsigned a, unsigned b) {
  const Fiber &x = machine.fibers[a], &y = machine.fibers[b];
  if (x.state != WAITING || y.state != WAITING || x.block_operation != y.block_operation) return false;
  return x.block_operation ||
         (a / LANES == b / LANES && x.warp_operation == y.warp_operation && x.mask == y.mask && x.bytes == y.bytes);
}

// Report a deadlock: which threads wait in which operation for which threads.
static void report_deadlock() {
  machine.message[0] = 0;
  add_text("kernel %s, block %u: deadlock", machine.kernel, machine.block);
  const char* separator = ": ";
  for (unsigned i = 0; i < machine.threads; ++i) {
    const Fiber& fiber = machine.fibers[i];
    bool reported = fiber.state != WAITING;
    for (unsigned j = 0; j < i && !reported; ++j) reported = wait_together(i, j);
    if (reported) continue;
    add_text("%sthreads ", separator);
    add_threads([&](unsigned j) { return wait_together(i, j); });
    add_text(" wait in %s", fiber.block_operation ? fiber.block_operation->name : fiber.warp_operation->name);
    if (!fiber.block_operation)
      add_text(fiber.bytes ? " (mask 0x%08x, %d bytes)" : " (mask 0x%08x)", fiber.mask, fiber.bytes);
    add_text(" for threads ");
    add_threads([&](unsigned j) {
      if (wait_together(i, j)) return false;
      if (fiber.block_operation) return machine.fibers[j].state != RETURNED;
      return i / LANES == j / LANES && (fiber.mask >> j % LANES & 1);
    });
    separator = "; ";
  }
  auto has_returned = [](unsigned j) { return machine.fibers[j].state == RETURNED; };
  if (machine.running < machine.threads) {
    add_text("; returned from the kernel: threads ");
    add_threads(has_returned);
  }
}

enum Order { ASCENDING = 0, DESCENDING = 1, SHUFFLED = 2 };

static inline uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = (state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static inline void shuffle(unsigned* items, unsigned count, uint64_t& random) {
  for (unsigned i = count; i > 1; --i) std::swap(items[i - 1], items[next_random(random) % i]);
}

static bool run_block(Order order, uint64_t& random) {
  unsigned turn[MOST_THREADS];
  const unsigned threads = machine.threads;
  machine.running = threads;
  machine.at_barrier = machine.nonzero = 0;
  for (unsigned i = 0; i < threads; ++i) {
    turn[i] = order == DESCENDING ? threads - 1 - i : i;
    Fiber& fiber = machine.fibers[i];
    fiber.state = READY;
    fiber.block_operation = nullptr;
    // Stack tops are staggered: at the same page offset they would compete for the same cache lines.
    size_t guard = (size_t)sysconf(_SC_PAGESIZE), moved = (i % 32) * 128;
    char* stack = machine.stacks + i * (STACK_BYTES + guard) + guard;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack, STACK_BYTES);  // left over from a stopped launch
#endif
    start_context(fiber.context, stack, STACK_BYTES - moved, fiber_entry);
  }
  for (unsigned first = 0; first < threads; first += LANES) {
    Warp& warp = machine.warps[first / LANES];
    warp.lanes = threads - first >= LANES ? ~0u : (1u << (threads - first)) - 1;
    warp.meeting_count = 0;
  }
  while (machine.running > 0) {
    bool has_moved = false;
    if (order == SHUFFLED) shuffle(turn, threads, random);
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = machine.fibers[turn[i]];
      if (fiber.state != READY) continue;
      has_moved = true;
      machine.current = turn[i];
      thread_index = {turn[i], 0, 0};
      switch_context(machine.scheduler, fiber.context);
      if (machine.stopped) return false;
    }
    if (!has_moved) {
      report_deadlock();
      return false;
    }
  }
  return true;
}

// ----------------------------------------------------------------------------------------------------------- launching

struct Region {
  char* begin;
  size_t bytes;
};
#ifdef __SANITIZE_ADDRESS__
static inline Region shared_memory() { return {}; }
#else
static thread_local char shared_anchor;  // located among the __shared__ variables; ensures that the region exists
static inline int find_shared_memory(dl_phdr_info* library, size_t, void* found) {
  char* begin = (char*)library->dlpi_tls_data;
  for (int i = 0; begin && i < library->dlpi_phnum; ++i) {
    size_t bytes = library->dlpi_phdr[i].p_memsz;
    if (library->dlpi_phdr[i].p_type == PT_TLS && begin <= &shared_anchor && &shared_anchor < begin + bytes) {
      *(Region*)found = {begin, bytes};
      return 1;
    }
  }
  return 0;
}
static inline Region shared_memory() {
  Region region = {};
  shared_anchor = 1;  // the loader allocates the region on first access
  dl_iterate_phdr(find_shared_memory, &region);
  return region;
}
#endif

// Map the stacks, each after a guard page, so that an overflow crashes instead of corrupting another stack.
static inline char* map_stacks() {
  size_t guard = (size_t)sysconf(_SC_PAGESIZE), each = STACK_BYTES + guard;
  void* stacks = mmap(nullptr, MOST_THREADS * each, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (stacks == MAP_FAILED) return nullptr;
  for (unsigned i = 0; i < MOST_THREADS; ++i) mprotect((char*)stacks + i * each, guard, PROT_NONE);
  return (char*)stacks;
}

// std::gcd, without the slow header <numeric>.
static inline uint64_t common_divisor(uint64_t a, uint64_t b) { return b ? common_divisor(b, a % b) : a; }

// Run all blocks; return null or an error message.
static inline const char* launch(const char* kernel, void (*call)(void**), unsigned grid, unsigned threads,
                                 void** arguments, Order order, uint64_t seed, char* stacks) {
  machine.kernel = kernel;
  machine.call = call;
  machine.arguments = arguments;
  machine.threads = threads;
  machine.stopped = false;
  machine.stacks = stacks;
  block_size = {threads, 1, 1};
  grid_size = {grid, 1, 1};
  Region shared = shared_memory();
  // Shuffled blocks: a stride coprime to the grid visits each once.
  uint64_t random = seed, start = 0, stride = 1;
  if (order == SHUFFLED) {
    start = next_random(random) % grid;
    do stride = next_random(random) % grid + 1;
    while (common_divisor(stride, grid) != 1);
  }
  for (uint64_t i = 0; i < grid; ++i) {
    machine.block = (unsigned)(order == DESCENDING ? grid - 1 - i : (start + i * stride) % grid);
    block_index = {machine.block, 0, 0};
    if (shared.bytes) memset(shared.begin, POISON, shared.bytes);
    if (!run_block(order, random)) return machine.message;
  }
  return nullptr;
}

// A kernel's parameter types.
template <class Kernel>
struct Signature;
template <class... Parameters>
struct Signature<void (*)(Parameters...)> {
  static int sizes(int* bytes) {
    const int all[] = {(int)sizeof(Parameters)..., 0};
    memcpy(bytes, all, sizeof...(Parameters) * sizeof(int));
    return (int)sizeof...(Parameters);
  }
  template <void (*kernel)(Parameters...)>
  static void call(void** arguments) {
    call_with<kernel>(arguments, std::index_sequence_for<Parameters...>());
  }
  template <void (*kernel)(Parameters...), size_t... i>
  static void call_with([[maybe_unused]] void** arguments, std::index_sequence<i...>) {
    kernel(*(Parameters*)arguments[i]...);
  }
};

}  // namespace cuda_on_cpu

// Interface of cuda_on_cpu.py. All libraries of a process share one set of stacks: mappings are limited.
#define CUDA_ON_CPU_VISIBLE extern "C" __attribute__((visibility("default")))
// Memory for definitions that are run-time values here and constants on a GPU.
CUDA_ON_CPU_VISIBLE unsigned char cuda_on_cpu_constant[512];
unsigned char cuda_on_cpu_constant[512];
CUDA_ON_CPU_VISIBLE void* cuda_on_cpu_stacks() { return cuda_on_cpu::map_stacks(); }
#define CUDA_ON_CPU_EXPORT(kernel)                                                                                   \
  CUDA_ON_CPU_VISIBLE int cuda_on_cpu_sizes_##kernel(int* bytes) {                                                   \
    return cuda_on_cpu::Signature<decltype(&::kernel)>::sizes(bytes);                                                \
  }                                                                                                                  \
  CUDA_ON_CPU_VISIBLE const char* cuda_on_cpu_launch_##kernel(unsigned grid, unsigned threads, void** arguments,     \
                                                              int order, unsigned long long seed, void* stacks) {    \
    return cuda_on_cpu::launch(#kernel, cuda_on_cpu::Signature<decltype(&::kernel)>::call<&::kernel>, grid, threads, \
                               arguments, (cuda_on_cpu::Order)order, seed, (char*)stacks);                           \
  }

// -------------------------------------------------------------------------------------------- names visible to kernels

static const uint3& threadIdx = cuda_on_cpu::thread_index;
static const uint3& blockIdx = cuda_on_cpu::block_index;
static const dim3& blockDim = cuda_on_cpu::block_size;
static const dim3& gridDim = cuda_on_cpu::grid_size;
static const int warpSize = cuda_on_cpu::LANES;

static inline void __trap() { cuda_on_cpu::stop("__trap"); }
static inline void __threadfence() { asm volatile("" ::: "memory"); }
static inline void __threadfence_block() { asm volatile("" ::: "memory"); }

// Barriers.
#define CUDA_ON_CPU_BARRIER(name, value)                  \
  static const cuda_on_cpu::BlockOperation name = {#name, \
                                                   [](unsigned nonzero, unsigned threads) { return (int)(value); }};
namespace cuda_on_cpu::block_operations {
CUDA_ON_CPU_BARRIER(__syncthreads, nonzero < threads)
CUDA_ON_CPU_BARRIER(__syncthreads_count, nonzero)
CUDA_ON_CPU_BARRIER(__syncthreads_and, nonzero == threads)
CUDA_ON_CPU_BARRIER(__syncthreads_or, nonzero > 0)
}  // namespace cuda_on_cpu::block_operations
static inline void __syncthreads() { cuda_on_cpu::meet_block(cuda_on_cpu::block_operations::__syncthreads, 0); }
#define CUDA_ON_CPU_VOTING_BARRIER(name)                                            \
  static inline int name(int predicate) {                                           \
    return cuda_on_cpu::meet_block(cuda_on_cpu::block_operations::name, predicate); \
  }
CUDA_ON_CPU_VOTING_BARRIER(__syncthreads_count)
CUDA_ON_CPU_VOTING_BARRIER(__syncthreads_and)
CUDA_ON_CPU_VOTING_BARRIER(__syncthreads_or)

namespace cuda_on_cpu {

template <class To, class From>
static inline To with_bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
template <class T>
static inline uint64_t to_word(T x) {
  uint64_t word = 0;
  memcpy(&word, &x, sizeof x);
  return word;
}
template <class T>
static inline T from_word(uint64_t word) {
  T x;
  memcpy(&x, &word, sizeof x);
  return x;
}

// Combine the values of the mask's lanes.
template <class T, class Combine>
static inline uint64_t reduce(const Brought& brought, Combine combine) {
  bool has_one = false;
  T all = T();
  for (unsigned lane = 0; lane < LANES; ++lane) {
    if (!(brought.mask >> lane & 1)) continue;
    T value = from_word<T>(brought.value[lane]);
    all = has_one ? combine(all, value) : value;
    has_one = true;
  }
  return to_word(all);
}
static inline uint32_t lanes_with_value(const Brought& brought, uint64_t value) {
  uint32_t lanes = 0;
  for (unsigned lane = 0; lane < LANES; ++lane)
    if ((brought.mask >> lane & 1) && brought.value[lane] == value) lanes |= 1u << lane;
  return lanes;
}

// shfl.sync of the PTX manual: for a lane outside the segment, the caller gets its own value.
#define CUDA_ON_CPU_SHUFFLE(name, source, is_inside)                                                            \
  static const WarpOperation name = {#name, [](const Brought& brought, int lane) {                              \
                                       const int segment = brought.width[lane], b = brought.operand[lane] & 31; \
                                       const int least = lane & ~(segment - 1), most = least | (segment - 1);   \
                                       const int from = source;                                                 \
                                       (void)least, (void)most;                                                 \
                                       return brought.value[is_inside ? from : lane];                           \
                                     }};
#define CUDA_ON_CPU_VOTE(name, value)       \
  static const WarpOperation name = {#name, \
                                     [](const Brought& brought, int lane) -> uint64_t { return (void)lane, value; }};
namespace warp_operations {
CUDA_ON_CPU_SHUFFLE(__shfl_sync, least | (b & (segment - 1)), true)
CUDA_ON_CPU_SHUFFLE(__shfl_up_sync, lane - b, from >= least)
CUDA_ON_CPU_SHUFFLE(__shfl_down_sync, lane + b, from <= most)
CUDA_ON_CPU_SHUFFLE(__shfl_xor_sync, lane ^ b, from <= most)
CUDA_ON_CPU_VOTE(__syncwarp, 0)
CUDA_ON_CPU_VOTE(__ballot_sync, lanes_with_value(brought, 1))
CUDA_ON_CPU_VOTE(__any_sync, lanes_with_value(brought, 1) != 0)
CUDA_ON_CPU_VOTE(__all_sync, lanes_with_value(brought, 1) == brought.mask)
CUDA_ON_CPU_VOTE(__match_any_sync, lanes_with_value(brought, brought.value[lane]))
template <class T>
CUDA_ON_CPU_VOTE(__reduce_add_sync, reduce<T>(brought, [](T a, T b) { return (T)((unsigned)a + (unsigned)b); }))
template <class T>
CUDA_ON_CPU_VOTE(__reduce_min_sync, reduce<T>(brought, [](T a, T b) { return a < b ? a : b; }))
template <class T>
CUDA_ON_CPU_VOTE(__reduce_max_sync, reduce<T>(brought, [](T a, T b) { return a < b ? b : a; }))
template <class T>
CUDA_ON_CPU_VOTE(__reduce_and_sync, reduce<T>(brought, [](T a, T b) { return a & b; }))
template <class T>
CUDA_ON_CPU_VOTE(__reduce_or_sync, reduce<T>(brought, [](T a, T b) { return a | b; }))
template <class T>
CUDA_ON_CPU_VOTE(__reduce_xor_sync, reduce<T>(brought, [](T a, T b) { return a ^ b; }))
}  // namespace warp_operations

}  // namespace cuda_on_cpu

// Hardware decides which lanes are active; here, all existing ones are, returned or not.
static inline unsigned __activemask() { return cuda_on_cpu::machine.warps[threadIdx.x / cuda_on_cpu::LANES].lanes; }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  cuda_on_cpu::meet(cuda_on_cpu::warp_operations::__syncwarp, mask, 0, 0);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return (unsigned)cuda_on_cpu::meet(cuda_on_cpu::warp_operations::__ballot_sync, mask, predicate != 0, 4);
}
static inline int __any_sync(unsigned mask, int predicate) {
  return (int)cuda_on_cpu::meet(cuda_on_cpu::warp_operations::__any_sync, mask, predicate != 0, 4);
}
static inline int __all_sync(unsigned mask, int predicate) {
  return (int)cuda_on_cpu::meet(cuda_on_cpu::warp_operations::__all_sync, mask, predicate != 0, 4);
}

// Overloads, not templates: short arguments are promoted to int, as in CUDA.
#define CUDA_ON_CPU_SHUFFLE_OF(name, Operand, T)                                                                      \
  static inline T name(unsigned mask, T value, Operand operand, int width = warpSize) {                               \
    return cuda_on_cpu::from_word<T>(cuda_on_cpu::meet(cuda_on_cpu::warp_operations::name, mask,                      \
                                                       cuda_on_cpu::to_word(value), sizeof(T), (int)operand, width)); \
  }
#define CUDA_ON_CPU_MATCH_OF(T)                                                              \
  static inline unsigned __match_any_sync(unsigned mask, T value) {                          \
    return (unsigned)cuda_on_cpu::meet(cuda_on_cpu::warp_operations::__match_any_sync, mask, \
                                       cuda_on_cpu::to_word(value), sizeof(T));              \
  }
#define CUDA_ON_CPU_EXCHANGES_OF(T)                     \
  CUDA_ON_CPU_SHUFFLE_OF(__shfl_sync, int, T)           \
  CUDA_ON_CPU_SHUFFLE_OF(__shfl_up_sync, unsigned, T)   \
  CUDA_ON_CPU_SHUFFLE_OF(__shfl_down_sync, unsigned, T) \
  CUDA_ON_CPU_SHUFFLE_OF(__shfl_xor_sync, int, T)       \
  CUDA_ON_CPU_MATCH_OF(T)
CUDA_ON_CPU_EXCHANGES_OF(int)
CUDA_ON_CPU_EXCHANGES_OF(unsigned)
CUDA_ON_CPU_EXCHANGES_OF(long)
CUDA_ON_CPU_EXCHANGES_OF(unsigned long)
CUDA_ON_CPU_EXCHANGES_OF(long long)
CUDA_ON_CPU_EXCHANGES_OF(unsigned long long)
CUDA_ON_CPU_EXCHANGES_OF(float)
CUDA_ON_CPU_EXCHANGES_OF(double)

#define CUDA_ON_CPU_REDUCE_OF(name, T)                                                                           \
  static inline T name(unsigned mask, T value) {                                                                 \
    return cuda_on_cpu::from_word<T>(                                                                            \
        cuda_on_cpu::meet(cuda_on_cpu::warp_operations::name<T>, mask, cuda_on_cpu::to_word(value), sizeof(T))); \
  }
CUDA_ON_CPU_REDUCE_OF(__reduce_add_sync, int)
CUDA_ON_CPU_REDUCE_OF(__reduce_add_sync, unsigned)
CUDA_ON_CPU_REDUCE_OF(__reduce_min_sync, int)
CUDA_ON_CPU_REDUCE_OF(__reduce_min_sync, unsigned)
CUDA_ON_CPU_REDUCE_OF(__reduce_max_sync, int)
CUDA_ON_CPU_REDUCE_OF(__reduce_max_sync, unsigned)
CUDA_ON_CPU_REDUCE_OF(__reduce_and_sync, unsigned)
CUDA_ON_CPU_REDUCE_OF(__reduce_or_sync, unsigned)
CUDA_ON_CPU_REDUCE_OF(__reduce_xor_sync, unsigned)

// ----------------------------------------------------------------------------------------------- arithmetic and memory

// As in CUDA: a number rather than a NaN, +0 above -0.
static inline float cuda_on_cpu_fmaxf(float a, float b) {
  if (a == b) return signbit(a) ? b : a;
  return a > b || b != b ? a : b;
}
static inline float cuda_on_cpu_fminf(float a, float b) {
  if (a == b) return signbit(a) ? a : b;
  return a < b || b != b ? a : b;
}
#define fmaxf cuda_on_cpu_fmaxf
#define fminf cuda_on_cpu_fminf

#define CUDA_ON_CPU_MIN_MAX(Result, A, B)                                                      \
  static inline Result min(A a, B b) { return (Result)a < (Result)b ? (Result)a : (Result)b; } \
  static inline Result max(A a, B b) { return (Result)a < (Result)b ? (Result)b : (Result)a; }
CUDA_ON_CPU_MIN_MAX(int, int, int)
CUDA_ON_CPU_MIN_MAX(unsigned, unsigned, unsigned)
CUDA_ON_CPU_MIN_MAX(unsigned, unsigned, int)
CUDA_ON_CPU_MIN_MAX(unsigned, int, unsigned)
CUDA_ON_CPU_MIN_MAX(long, long, long)
CUDA_ON_CPU_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUDA_ON_CPU_MIN_MAX(long long, long long, long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long, unsigned long long, long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long, long long, unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(float a, double b) { return fmin(a, b); }
static inline double max(float a, double b) { return fmax(a, b); }
static inline double min(double a, float b) { return fmin(a, b); }
static inline double max(double a, float b) { return fmax(a, b); }

static inline unsigned __float_as_uint(float x) { return cuda_on_cpu::with_bits_of<unsigned>(x); }
static inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::with_bits_of<float>(bits); }
static inline int __float_as_int(float x) { return cuda_on_cpu::with_bits_of<int>(x); }
static inline float __int_as_float(int bits) { return cuda_on_cpu::with_bits_of<float>(bits); }
static inline long long __double_as_longlong(double x) { return cuda_on_cpu::with_bits_of<long long>(x); }
static inline double __longlong_as_double(long long bits) { return cuda_on_cpu::with_bits_of<double>(bits); }

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
  return reversed;
}
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  // The manual defines three bits per byte; hardware uses the fourth to replicate the sign.
  if (selector & 0x8888u) cuda_on_cpu::stop("__byte_perm: selector 0x%04x has a byte above 7", selector);
  unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}

#define CUDA_ON_CPU_LOAD(name)             \
  template <class T>                       \
  static inline T name(const T* address) { \
    return *address;                       \
  }
CUDA_ON_CPU_LOAD(__ldg)
CUDA_ON_CPU_LOAD(__ldca)
CUDA_ON_CPU_LOAD(__ldcg)
CUDA_ON_CPU_LOAD(__ldcs)
CUDA_ON_CPU_LOAD(__ldcv)
CUDA_ON_CPU_LOAD(__ldlu)
#define CUDA_ON_CPU_STORE(name)                  \
  template <class T>                             \
  static inline void name(T* address, T value) { \
    *address = value;                            \
  }
CUDA_ON_CPU_STORE(__stcg)
CUDA_ON_CPU_STORE(__stcs)
CUDA_ON_CPU_STORE(__stwb)
CUDA_ON_CPU_STORE(__stwt)

// Plain operations are atomic, since one thread runs at a time. Overloads for CUDA's types.
#define CUDA_ON_CPU_ATOMIC(name, T, combined) \
  static inline T name(T* address, T value) { \
    T old = *address;                         \
    *address = (T)(combined);                 \
    return old;                               \
  }
#define CUDA_ON_CPU_ATOMICS_OF(T)                              \
  CUDA_ON_CPU_ATOMIC(atomicExch, T, value)                     \
  CUDA_ON_CPU_ATOMIC(atomicMin, T, value < old ? value : old)  \
  CUDA_ON_CPU_ATOMIC(atomicMax, T, old < value ? value : old)  \
  CUDA_ON_CPU_ATOMIC(atomicAnd, T, old& value)                 \
  CUDA_ON_CPU_ATOMIC(atomicOr, T, old | value)                 \
  CUDA_ON_CPU_ATOMIC(atomicXor, T, old ^ value)                \
  static inline T atomicCAS(T* address, T expected, T value) { \
    T old = *address;                                          \
    if (old == expected) *address = value;                     \
    return old;                                                \
  }
CUDA_ON_CPU_ATOMICS_OF(int)
CUDA_ON_CPU_ATOMICS_OF(unsigned)
CUDA_ON_CPU_ATOMICS_OF(long long)
CUDA_ON_CPU_ATOMICS_OF(unsigned long long)
CUDA_ON_CPU_ATOMIC(atomicExch, float, value)
CUDA_ON_CPU_ATOMIC(atomicAdd, int, (unsigned)old + (unsigned)value)
CUDA_ON_CPU_ATOMIC(atomicAdd, unsigned, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, unsigned long long, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, float, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, double, old + value)
CUDA_ON_CPU_ATOMIC(atomicSub, int, (unsigned)old - (unsigned)value)
CUDA_ON_CPU_ATOMIC(atomicSub, unsigned, old - value)

#endif
