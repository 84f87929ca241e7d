// Driver: the CUDA driver opened with dlopen, a table of the entry points the runtime calls, and one device's primary context.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <type_traits>

#include "counters.h"
#include "errors.h"

// The two checks of this module. The first throws Error with file, line, the call with its arguments (so the bytes of a
// memory call), and the result's name and text. The second is for destructors: it never throws, it counts.
#define DRIVER_TRY(driver, entry, ...) (driver).require(__FILE__, __LINE__, (driver).entry, __VA_ARGS__)
#define DRIVER_TRY_NOEXCEPT(driver, entry, ...) (driver).count_failure((driver).entry, __VA_ARGS__)

namespace tensorrt_llm_ext {

using Result = int;  // CUresult
using DeviceAddress = unsigned long long;
using ContextHandle = void*;
using StreamHandle = void*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;
inline constexpr Result kNotSupported = 801;

// Has the device stopped for good with this result? After these no work of the context runs or writes any more.
inline bool is_fatal(Result result) {
    switch (result) {
        case 4:    // DEINITIALIZED
        case 201:  // INVALID_CONTEXT
        case 214:  // ECC_UNCORRECTABLE
        case 220:  // NVLINK_UNCORRECTABLE
        case 700:  // ILLEGAL_ADDRESS
        case 702:  // LAUNCH_TIMEOUT
        case 709:  // CONTEXT_IS_DESTROYED
        case 710:  // ASSERT
        case 714:  // HARDWARE_STACK_ERROR
        case 715:  // ILLEGAL_INSTRUCTION
        case 716:  // MISALIGNED_ADDRESS
        case 717:  // INVALID_ADDRESS_SPACE
        case 718:  // INVALID_PC
        case 719:  // LAUNCH_FAILED
            return true;
        default: return false;
    }
}

enum class Waits { no, maybe };  // may the call wait for work on the device?

template <class... Arguments>
struct EntryPoint {
    const char* name;
    Waits waits = Waits::no;
    Result (*function)(Arguments...) = nullptr;
    mutable std::atomic<uint64_t> num_calls{0};

    EntryPoint(const char* name, Waits waits = Waits::no) : name(name), waits(waits) {}

    Result operator()(Arguments... arguments) const {
        num_calls.fetch_add(1, std::memory_order_relaxed);
        if (waits == Waits::maybe && counters.tickets_open.load() > 0) ++counters.synchronisations;
        return function(arguments...);
    }
};

class Driver {
public:
    // Opens the library, initialises it and retains the primary context of `device`, which torch and TensorRT share. Both are
    // kept to the process's end: torch's profiler listens for a context's end, and may itself be gone when it comes at exit.
    explicit Driver(const std::string& path = "libcuda.so.1", int device = 0);
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    int version() const { return version_; }
    bool has_stream_memory_operations() const { return cuStreamWriteValue32.function && cuStreamWaitValue32.function; }
    std::map<std::string, uint64_t> calls() const;
    std::string describe(Result result) const;  // "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"

    template <class... Arguments, class... Given>
    void require(const char* file, int line, const EntryPoint<Arguments...>& entry, Given... given) const {
        Result result = entry(given...);
        if (result == kSuccess) return;
        std::string call = std::string(entry.name) + '(';
        const char* comma = "";
        ((call += comma + shown(given), comma = ", "), ...);
        fail(file, line, call + ')', result);
    }

    template <class... Arguments, class... Given>
    bool count_failure(const EntryPoint<Arguments...>& entry, Given... given) const noexcept {
        const Result result = entry(given...);
        if (result != kSuccess && !is_fatal(result)) ++counters.destructor_errors;  // a lost device was reported by its stream
        return result == kSuccess;
    }

    EntryPoint<unsigned> cuInit{"cuInit"};
    EntryPoint<int*> cuDriverGetVersion{"cuDriverGetVersion"};
    EntryPoint<int*, int> cuDeviceGet{"cuDeviceGet"};
    EntryPoint<ContextHandle*, int> cuDevicePrimaryCtxRetain{"cuDevicePrimaryCtxRetain"};
    EntryPoint<ContextHandle> cuCtxPushCurrent{"cuCtxPushCurrent_v2"};
    EntryPoint<ContextHandle*> cuCtxPopCurrent{"cuCtxPopCurrent_v2"};
    EntryPoint<StreamHandle*, unsigned> cuStreamCreate{"cuStreamCreate"};
    EntryPoint<StreamHandle> cuStreamDestroy{"cuStreamDestroy_v2"};
    EntryPoint<StreamHandle> cuStreamQuery{"cuStreamQuery"};
    EntryPoint<void*, size_t, unsigned> cuMemHostRegister{"cuMemHostRegister_v2", Waits::maybe};
    EntryPoint<void*> cuMemHostUnregister{"cuMemHostUnregister", Waits::maybe};
    EntryPoint<DeviceAddress*, void*, unsigned> cuMemHostGetDevicePointer{"cuMemHostGetDevicePointer_v2"};
    EntryPoint<DeviceAddress*, size_t> cuMemAlloc{"cuMemAlloc_v2", Waits::maybe};
    EntryPoint<DeviceAddress> cuMemFree{"cuMemFree_v2", Waits::maybe};
    EntryPoint<size_t*, size_t*> cuMemGetInfo{"cuMemGetInfo_v2"};
    EntryPoint<DeviceAddress, const void*, size_t, StreamHandle> cuMemcpyHtoDAsync{"cuMemcpyHtoDAsync_v2"};
    EntryPoint<void*, DeviceAddress, size_t, StreamHandle> cuMemcpyDtoHAsync{"cuMemcpyDtoHAsync_v2"};
    EntryPoint<StreamHandle, DeviceAddress, uint32_t, unsigned> cuStreamWriteValue32{"cuStreamWriteValue32_v2"};
    EntryPoint<StreamHandle, DeviceAddress, uint32_t, unsigned> cuStreamWaitValue32{"cuStreamWaitValue32_v2"};
    EntryPoint<StreamHandle, void (*)(void*), void*> cuLaunchHostFunc{"cuLaunchHostFunc"};
    EntryPoint<Result, const char**> cuGetErrorName{"cuGetErrorName"};
    EntryPoint<Result, const char**> cuGetErrorString{"cuGetErrorString"};

private:
    friend class CurrentContext;

    [[noreturn]] void fail(const char* file, int line, const std::string& call, Result result) const;

    template <class Self, class Visit>
    static void for_each_entry(Self& self, Visit visit);

    template <class Value>
    static std::string shown(Value value) {
        if constexpr (!std::is_pointer_v<Value>) return std::to_string(value);
        else if constexpr (std::is_function_v<std::remove_pointer_t<Value>>) return "function";
        else {
            char text[32];  // not a std::ostringstream: where libstdc++ is linked statically, torch's copy owns its locale
            std::snprintf(text, sizeof text, "%p", static_cast<const void*>(value));
            return text;
        }
    }

    int version_ = 0;
    ContextHandle context_ = nullptr;
};

// Makes the primary context current in this thread for as long as it lives.
class CurrentContext {
public:
    explicit CurrentContext(const Driver& driver) : driver_(driver) { DRIVER_TRY(driver_, cuCtxPushCurrent, driver_.context_); }
    ~CurrentContext() { pop(driver_); }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

    // For destructors: runs `release` with the context current; when it cannot be made current, what was in it is gone.
    template <class Release>
    static void within(const Driver& driver, Release release) noexcept {
        if (!DRIVER_TRY_NOEXCEPT(driver, cuCtxPushCurrent, driver.context_)) return;
        release();
        pop(driver);
    }

    // For questions: what `ask` answers with the context current, or why it cannot be made current.
    template <class Ask>
    static Result answer(const Driver& driver, Ask ask) {
        const Result pushed = driver.cuCtxPushCurrent(driver.context_);
        if (pushed != kSuccess) return pushed;
        const Result answer = ask();
        pop(driver);
        return answer;
    }

private:
    static void pop(const Driver& driver) noexcept {
        ContextHandle popped;
        DRIVER_TRY_NOEXCEPT(driver, cuCtxPopCurrent, &popped);
    }

    const Driver& driver_;
};

}  // namespace tensorrt_llm_ext
