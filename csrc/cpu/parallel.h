// Threads for CPU kernels.
//
// The kernels run between torch's matrix products, whose OpenMP workers keep spinning for a while after each one: threads of our own
// would share the cores with them (seen: 3 to 7 times slower on two cores). So the team of the OpenMP runtime that torch loaded is used,
// through the GNU entry point that libgomp, libomp and libiomp5 all export, found at run time: this module links to none of them.
// Where there is no such runtime, threads are started per call.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace grpo {
namespace detail {

struct OpenMP {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*thread_number)() = nullptr;
  int (*team_size)() = nullptr;

  static const OpenMP& loaded() {
    static const OpenMP runtime = [] {
      OpenMP found;
      found.parallel = reinterpret_cast<decltype(found.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
      found.thread_number = reinterpret_cast<decltype(found.thread_number)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
      found.team_size = reinterpret_cast<decltype(found.team_size)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
      if (!found.thread_number || !found.team_size) found.parallel = nullptr;
      return found;
    }();
    return runtime;
  }
};

}  // namespace detail

// 2^17 exponentials are about 80 us of work: below that a thread's start costs more than it saves.
inline int useful_threads(int threads, int64_t exponentials) {
  return static_cast<int>(std::min<int64_t>(std::max(threads, 1), exponentials >> 17));
}

// Calls body(begin, end) on at most `threads` disjoint ranges that cover [0, count), cut at multiples of `grain`. The body must not throw.
template <typename Body>
void parallel_ranges(int64_t count, int64_t grain, int threads, const Body& body) {
  const int64_t blocks = (count + grain - 1) / grain;
  if (threads > blocks) threads = static_cast<int>(blocks);
  if (threads <= 1) {
    body(0, count);
    return;
  }
  const auto part = [&](int i, int parts) {
    const int64_t begin = blocks * i / parts * grain, end = i + 1 == parts ? count : blocks * (i + 1) / parts * grain;
    body(begin, end);
  };
  const detail::OpenMP& openmp = detail::OpenMP::loaded();
  if (openmp.parallel) {
    using Part = decltype(part);
    const auto entry = [](void* data) {
      const detail::OpenMP& team = detail::OpenMP::loaded();
      (*static_cast<Part*>(data))(team.thread_number(), team.team_size());  // the team may be smaller than asked for
    };
    openmp.parallel(entry, const_cast<void*>(static_cast<const void*>(&part)), static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> workers;
  workers.reserve(threads - 1);
  for (int i = 1; i < threads; ++i) workers.emplace_back([&part, i, threads] { part(i, threads); });
  part(0, threads);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace grpo
