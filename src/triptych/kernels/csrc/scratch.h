// Memory for one call, kept between calls: a thread's buffer only grows.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace triptych {

class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { unmap(); }

    // `count` uninitialised Ts on a cache line; what it gave before is gone. Throws std::bad_alloc.
    template <class T>
    T* take(size_t count) {
        const size_t bytes = count * sizeof(T);
        if (bytes > size_) {
            unmap();
            const size_t rounded = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
            void* memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) throw std::bad_alloc();
            madvise(memory, rounded, MADV_HUGEPAGE);
            memory_ = memory;
            size_ = rounded;
        }
        return static_cast<T*>(memory_);
    }

  private:
    static constexpr size_t HUGE_PAGE = 2 << 20;

    void unmap() {
        if (size_) munmap(memory_, size_);
        size_ = 0;
    }

    void* memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace triptych
