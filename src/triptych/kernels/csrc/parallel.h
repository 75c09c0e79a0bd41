// Loops over the threads of a worker. One thread a worker is the usual case: then nothing is started.
//
// During a call a worker also has threads on cores that other workers lend because they have nothing to do
// (`triptych/lent_cores.py`). Results do not depend on the number of threads.

#pragma once

#include <omp.h>
#include <sched.h>

#include <cstdint>

namespace triptych {

struct Team {
    static constexpr int MOST_LENT = 64;
    enum Use : uint8_t { FREE, OWNER };  // of a core, as `lent_cores.py` writes it; else the number of who borrowed it

    int num_own = 1;  // threads on the worker's own cores
    int size = 1;     // and those on borrowed ones, during a call
    uint8_t* uses = nullptr;
    uint8_t borrower = 0;  // this worker's number
    int num_lent = 0;
    int lent[MOST_LENT];      // cores that may be borrowed
    int borrowed[MOST_LENT];  // during a call: the cores of the threads from `num_own` on
};

inline Team& team() {
    static Team team;
    return team;
}

inline int num_threads() { return team().size; }

// Borrows every core that is free, for one call: a layer, so that an owner who gets work waits for no more than that.
class Borrowed {
    int count = 0;

  public:
    Borrowed() {
        Team& t = team();
        for (int i = 0; i < t.num_lent; ++i) {
            uint8_t use = Team::FREE;
            if (__atomic_compare_exchange_n(t.uses + t.lent[i], &use, t.borrower, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED))
                t.borrowed[count++] = t.lent[i];
        }
        t.size = t.num_own + count;
    }

    ~Borrowed() {
        Team& t = team();
        for (int i = 0; i < count; ++i) {
            uint8_t use = t.borrower;  // if not, its owner has taken it back, and may have lent it to another
            __atomic_compare_exchange_n(t.uses + t.borrowed[i], &use, Team::FREE, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED);
        }
        t.size = t.num_own;
    }

    Borrowed(const Borrowed&) = delete;
};

// The calling thread goes to its core, if that is a borrowed one. It stays where it was if it may not run there.
inline void settle() {
    static thread_local int settled = -1;
    const int index = omp_get_thread_num() - team().num_own;
    if (index < 0 || team().borrowed[index] == settled) return;
    settled = team().borrowed[index];
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(settled, &cores);
    sched_setaffinity(0, sizeof(cores), &cores);
}

// body(i) for i < count, in any order.
template <class Body>
void for_each(long count, const Body& body) {
    if (num_threads() == 1 || count == 1) {
        for (long i = 0; i < count; ++i) body(i);
        return;
    }
#pragma omp parallel num_threads(num_threads())
    {
        settle();
#pragma omp for schedule(dynamic) nowait
        for (long i = 0; i < count; ++i) body(i);
    }
}

// body(first, end) for one contiguous part of [0, count) a thread. All threads of the team come along, those without a
// part too: libgomp ends threads that the next team lacks.
template <class Body>
void for_each_part(long count, const Body& body) {
    const long parts = num_threads() < count ? num_threads() : count;
    if (parts <= 1) {
        body(0L, count);
        return;
    }
#pragma omp parallel num_threads(num_threads())
    {
        settle();
#pragma omp for schedule(static, 1) nowait
        for (long i = 0; i < parts; ++i) body(count * i / parts, count * (i + 1) / parts);
    }
}

}  // namespace triptych
