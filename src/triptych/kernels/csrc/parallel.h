// Loops over the threads of a worker. One thread a worker is the usual case: then nothing is started.

#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

namespace triptych {

inline int& num_threads() {
    static int count = 1;
    return count;
}

// body(i) for i < count, in any order.
template <class Body>
void for_each(long count, const Body& body) {
    if (num_threads() == 1 || count == 1) {
        for (long i = 0; i < count; ++i) body(i);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(num_threads())
    for (long i = 0; i < count; ++i) body(i);
}

// body(first, end) for one contiguous part of [0, count) a thread.
template <class Body>
void for_each_part(long count, const Body& body) {
    const long parts = num_threads() < count ? num_threads() : count;
    if (parts <= 1) {
        body(0L, count);
        return;
    }
#pragma omp parallel for schedule(static, 1) num_threads(parts)
    for (long i = 0; i < parts; ++i) body(count * i / parts, count * (i + 1) / parts);
}

}  // namespace triptych
