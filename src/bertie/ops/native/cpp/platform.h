// What differs between platforms and compilers: exported functions, memory pages, waiting, and threads without OpenMP.
//
// The kernels use the vector types of GCC and clang. The build leaves the library out where this file is an error.

#if defined(_MSC_VER) && !defined(__clang__)
#error "MSVC has no vector types: set CXX to clang++"
#endif
#if defined(_WIN32) && !defined(__clang__)
#error "GCC for Windows misaligns AVX registers on the stack (GCC bug 54412): set CXX to clang++"
#endif

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef _WIN32
#include <malloc.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

using Index = std::ptrdiff_t;  // long has 32 bits on Windows

inline void *allocate_pages(size_t alignment, size_t bytes) {
#ifdef _WIN32
    return _aligned_malloc(bytes, alignment);
#else
    return std::aligned_alloc(alignment, bytes);
#endif
}

inline void free_pages(void *memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

inline void advise_huge_pages(void *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

inline void cpu_pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#ifdef __linux__
inline void sleep_while(std::atomic<int> &value, int expected) {
    syscall(SYS_futex, (int *)&value, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
inline void wake_all(std::atomic<int> &value) {
    syscall(SYS_futex, (int *)&value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
inline void sleep_while(std::atomic<int> &, int) { std::this_thread::yield(); }
inline void wake_all(std::atomic<int> &) {}
#endif

#if defined(__x86_64__)
// Instruction sets that CPU and operating system support. (Not __builtin_cpu_supports: some runtimes lack it.)
struct CpuFeatures {
    bool avx2 = false, avx512 = false, vnni = false, bf16 = false;

    CpuFeatures() {
        unsigned a, b, c, d, states, unused;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
        __asm__("xgetbv" : "=a"(states), "=d"(unused) : "c"(0));  // register states that the operating system saves
        bool fma = c & bit_FMA, ymm = (states & 0x06) == 0x06, zmm = (states & 0xE6) == 0xE6;
        if (!fma || !ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        constexpr unsigned F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31;  // of AVX-512, in ebx
        avx2 = b & (1u << 5);
        avx512 = avx2 && zmm && (b & (F | DQ | BW | VL)) == (F | DQ | BW | VL);
        vnni = avx512 && (c & (1u << 11));
        bf16 = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
    }
};
#endif

// Instructions of this CPU. 0: generic; x86-64: 1 AVX2, 2 AVX-512, 3 AVX-512 with VNNI; AArch64: 1 NEON, 2 NEON with
// the int8 dot product.
inline int detect_isa_level() {
#if defined(__x86_64__)
    CpuFeatures cpu;
    return cpu.vnni ? 3 : cpu.avx512 ? 2 : cpu.avx2 ? 1 : 0;
#elif defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) & (1ul << 20) ? 2 : 1;  // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
    return 2;  // every Apple CPU that runs macOS has it
#elif defined(__aarch64__)
    return 1;
#else
    return 0;
#endif
}

// torch's own OpenMP runtime: a second thread pool would compete with it for the cores.
struct OpenMP {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;  // GOMP_parallel
    int (*thread_num)() = nullptr;                                            // omp_get_thread_num
    int (*num_threads)() = nullptr;                                           // omp_get_num_threads
};

// Runs f(rank, team size) on up to `threads` threads, including the caller's. Without OpenMP, as on Windows, they are
// started for this call.
template <class F> void run_team(const OpenMP &openmp, int threads, F &f) {
    if (threads <= 1) return f(0, 1);
    if (openmp.parallel) {
        struct Call {
            const OpenMP &openmp;
            F &f;
        } call{openmp, f};
        auto body = [](void *p) {
            auto *c = (Call *)p;
            c->f(c->openmp.thread_num(), c->openmp.num_threads());
        };
        return openmp.parallel(body, &call, (unsigned)threads, 0);
    }
    std::vector<std::thread> team;
    for (int rank = 1; rank < threads; rank++) team.emplace_back([&f, rank, threads] { f(rank, threads); });
    f(0, threads);
    for (auto &thread : team) thread.join();
}
