// A stand-in for the CUDA driver: the entry points the runtime calls, executed on threads of this process.
//
// It is stricter than a driver. Device addresses are not host addresses, so a mixed-up pointer crashes or is counted; every
// pointer of a call is checked against what is live, at the call and again when the work executes; calls without a current
// context fail. It delays work at random, counts calls, fails the n-th call on demand, loses doorbell writes, and breaks.
// Tests load it by path as the driver, and again through ctypes for the control functions at the end.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using Result = int;
using Address = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kInvalidContext = 201, kNotReady = 600, kNotSupported = 801;
constexpr Address kDeviceBit = 1ull << 62;  // no host address has it: following a device pointer on the host is a fault

struct Block {
    char* host;
    size_t num_bytes;
};

struct Stream {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool is_busy = false;
    bool is_ending = false;
    std::thread thread;
};

struct Plan {  // what to do wrong
    int calls_until = 0;
    Result code = kSuccess;
    bool is_sticky = false;
};

std::mutex mutex;  // guards all below
std::map<std::string_view, long> calls;  // by __func__
std::map<std::string, Plan, std::less<>> plans;
std::map<Address, Block> device_blocks;
std::map<char*, size_t> registered;
std::map<void*, std::shared_ptr<Stream>> streams;
std::vector<std::string> violations;
long num_calls = 0;
Plan any_call;
const char* failed_call = "";  // the last that a plan failed
std::atomic<Result> sticky{kSuccess};
std::atomic<int> longest_delay_us{0};
std::atomic<int> writes_to_lose{0};
std::atomic<int> copies_out_to_lose{0};
std::atomic<bool> are_memory_operations_refused{false};
std::atomic<bool> is_initialized{false};
int context_object;
thread_local int current_depth = 0;
thread_local bool was_planned = false;  // this thread's last call failed because a test asked for it

void violation(const std::string& what) {
    std::lock_guard lock(mutex);
    violations.push_back(what);
}

// Counts a call and says what it must return: success, a planned failure, or the sticky error.
Result enter(const char* name, bool needs_context) {
    std::lock_guard lock(mutex);
    ++calls[name];
    ++num_calls;
    was_planned = false;
    const auto planned = plans.find(std::string_view(name));
    for (Plan* plan : {planned == plans.end() ? nullptr : &planned->second, &any_call}) {
        if (!plan || plan->calls_until == 0 || --plan->calls_until > 0) continue;
        if (plan->is_sticky) sticky = plan->code;
        failed_call = name;
        was_planned = true;
        return plan->code;
    }
    if (sticky != kSuccess) return sticky;
    if (!is_initialized && std::strcmp(name, "cuInit") != 0) return kNotInitialized;
    if (needs_context && current_depth == 0) return kInvalidContext;
    return kSuccess;
}

// The host memory behind a device range that is live, or null and a violation.
char* behind(Address address, size_t num_bytes, const char* who) {
    std::lock_guard lock(mutex);
    auto block = device_blocks.upper_bound(address);
    if (block != device_blocks.begin()) {
        --block;
        const size_t offset = address - block->first;
        if (offset + num_bytes <= block->second.num_bytes) return block->second.host + offset;
    }
    violations.push_back(std::string(who) + ": device range is not live");
    return nullptr;
}

bool is_registered(const void* pointer, size_t num_bytes, const char* who) {
    std::lock_guard lock(mutex);
    char* host = static_cast<char*>(const_cast<void*>(pointer));
    auto range = registered.upper_bound(host);
    if (range != registered.begin()) {
        --range;
        if (host + num_bytes <= range->first + range->second) return true;
    }
    violations.push_back(std::string(who) + ": host range is not registered");
    return false;
}

std::shared_ptr<Stream> find(void* handle, const char* who) {
    std::lock_guard lock(mutex);
    auto found = streams.find(handle);
    if (found != streams.end()) return found->second;
    violations.push_back(std::string(who) + ": the stream is not live");
    return nullptr;
}

void delay() {
    thread_local std::mt19937 random(static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
    const int longest = longest_delay_us;
    if (longest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % longest));
}

void serve(Stream* stream) {
    std::unique_lock lock(stream->mutex);
    while (true) {
        stream->changed.wait(lock, [&] { return !stream->work.empty() || stream->is_ending; });
        if (stream->work.empty()) return;
        auto work = std::move(stream->work.front());
        stream->work.pop_front();
        stream->is_busy = true;
        lock.unlock();
        delay();
        if (sticky == kSuccess) work();
        lock.lock();
        stream->is_busy = false;
    }
}

Result push(void* handle, const char* who, std::function<void()> work) {
    auto stream = find(handle, who);
    if (!stream) return kInvalidValue;
    {
        std::lock_guard lock(stream->mutex);
        stream->work.push_back(std::move(work));
    }
    stream->changed.notify_one();
    return kSuccess;
}

std::atomic<uint32_t>* word(Address address, const char* who) {
    return reinterpret_cast<std::atomic<uint32_t>*>(behind(address, sizeof(uint32_t), who));
}

}  // namespace

#define ENTER(needs_context) \
    if (Result refused = enter(__func__, needs_context); refused != kSuccess) return refused

extern "C" {

Result cuInit(unsigned) {
    ENTER(false);
    is_initialized = true;
    return kSuccess;
}

Result cuDriverGetVersion(int* version) {
    ENTER(false);
    *version = 13000;
    return kSuccess;
}

Result cuDeviceGet(int* device, int ordinal) {
    ENTER(false);
    if (ordinal != 0) return 101;
    *device = 0;
    return kSuccess;
}

Result cuDevicePrimaryCtxRetain(void** context, int) {
    ENTER(false);
    *context = &context_object;
    return kSuccess;
}

Result cuCtxPushCurrent_v2(void* context) {
    const Result refused = enter(__func__, false);
    if (refused != kSuccess && was_planned) return refused;  // a dead context can still be made current
    if (context != &context_object) return kInvalidContext;
    ++current_depth;
    return kSuccess;
}

Result cuCtxPopCurrent_v2(void** context) {
    const Result refused = enter(__func__, false);
    if (current_depth > 0) --current_depth;
    *context = &context_object;
    return refused;
}

Result cuStreamCreate(void** handle, unsigned) {
    ENTER(true);
    auto stream = std::make_shared<Stream>();
    stream->thread = std::thread(serve, stream.get());
    std::lock_guard lock(mutex);
    *handle = stream.get();
    streams[*handle] = stream;
    return kSuccess;
}

Result cuStreamDestroy_v2(void* handle) {
    const Result refused = enter(__func__, true);
    if (refused != kSuccess && refused != sticky) return refused;
    auto stream = find(handle, __func__);
    if (!stream) return kInvalidValue;
    {
        std::lock_guard lock(stream->mutex);
        if (sticky == kSuccess && (!stream->work.empty() || stream->is_busy)) violation("cuStreamDestroy: work is left");
        stream->is_ending = true;
    }
    stream->changed.notify_one();
    stream->thread.join();
    std::lock_guard lock(mutex);
    streams.erase(handle);
    return refused;
}

Result cuStreamQuery(void* handle) {
    ENTER(true);
    auto stream = find(handle, __func__);
    if (!stream) return kInvalidValue;
    std::lock_guard lock(stream->mutex);
    return stream->work.empty() && !stream->is_busy ? kSuccess : kNotReady;
}

// Not in the runtime's table. They are here so that a call would be seen.
Result cuStreamSynchronize(void*) { return enter(__func__, true), kNotSupported; }
Result cuCtxSynchronize() { return enter(__func__, true), kNotSupported; }
Result cuEventSynchronize(void*) { return enter(__func__, true), kNotSupported; }

Result cuMemHostRegister_v2(void* pointer, size_t num_bytes, unsigned) {
    ENTER(true);
    std::lock_guard lock(mutex);
    registered[static_cast<char*>(pointer)] = num_bytes;
    device_blocks[reinterpret_cast<Address>(pointer) | kDeviceBit] = {static_cast<char*>(pointer), num_bytes};
    return kSuccess;
}

Result cuMemHostUnregister(void* pointer) {
    const Result refused = enter(__func__, true);
    if (refused != kSuccess && refused != sticky) return refused;
    std::lock_guard lock(mutex);
    if (!registered.erase(static_cast<char*>(pointer))) violations.push_back("cuMemHostUnregister: not registered");
    device_blocks.erase(reinterpret_cast<Address>(pointer) | kDeviceBit);
    return refused;
}

Result cuMemHostGetDevicePointer_v2(Address* address, void* pointer, unsigned) {
    ENTER(true);
    if (!is_registered(pointer, 1, __func__)) return kInvalidValue;
    *address = reinterpret_cast<Address>(pointer) | kDeviceBit;
    return kSuccess;
}

Result cuMemAlloc_v2(Address* address, size_t num_bytes) {
    ENTER(true);
    char* host = static_cast<char*>(std::malloc(num_bytes));
    std::memset(host, 0xA5, num_bytes);  // nobody may count on zeros
    std::lock_guard lock(mutex);
    *address = reinterpret_cast<Address>(host) | kDeviceBit;
    device_blocks[*address] = {host, num_bytes};
    return kSuccess;
}

Result cuMemFree_v2(Address address) {
    const Result refused = enter(__func__, true);
    if (refused != kSuccess && refused != sticky) return refused;
    std::lock_guard lock(mutex);
    auto block = device_blocks.find(address);
    if (block == device_blocks.end()) {
        violations.push_back("cuMemFree: not live");
        return kInvalidValue;
    }
    std::free(block->second.host);
    device_blocks.erase(block);
    return refused;
}

Result cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER(true);
    *free = 1ull << 30;
    *total = 2ull << 30;
    return kSuccess;
}

Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t num_bytes, void* stream) {
    ENTER(true);
    const char* who = __func__;
    if (!behind(to, num_bytes, who) || !is_registered(from, num_bytes, who)) return kInvalidValue;
    return push(stream, who, [=] {
        char* host = behind(to, num_bytes, who);
        if (host && is_registered(from, num_bytes, who)) std::memcpy(host, from, num_bytes);
    });
}

Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t num_bytes, void* stream) {
    ENTER(true);
    const char* who = __func__;
    if (!behind(from, num_bytes, who) || !is_registered(to, num_bytes, who)) return kInvalidValue;
    return push(stream, who, [=] {
        if (copies_out_to_lose > 0 && copies_out_to_lose.fetch_sub(1) > 0) return;
        char* host = behind(from, num_bytes, who);
        if (host && is_registered(to, num_bytes, who)) std::memcpy(to, host, num_bytes);
    });
}

Result cuStreamWriteValue32_v2(void* stream, Address address, uint32_t value, unsigned flags) {
    ENTER(true);
    if (are_memory_operations_refused) return kNotSupported;
    const char* who = __func__;
    if (flags != 0) violation("cuStreamWriteValue32: without the system fence");
    if (!word(address, who)) return kInvalidValue;
    return push(stream, who, [=] {
        if (writes_to_lose > 0 && writes_to_lose.fetch_sub(1) > 0) return;
        if (auto* line = word(address, who)) line->store(value, std::memory_order_release);
    });
}

Result cuStreamWaitValue32_v2(void* stream, Address address, uint32_t value, unsigned flags) {
    ENTER(true);
    if (are_memory_operations_refused) return kNotSupported;
    const char* who = __func__;
    if (flags != 0) violation("cuStreamWaitValue32: not a cyclic >=");
    return push(stream, who, [=] {
        while (sticky == kSuccess) {
            auto* line = word(address, who);
            if (!line || static_cast<int32_t>(line->load(std::memory_order_acquire) - value) >= 0) return;
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    });
}

Result cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
    ENTER(true);
    return push(stream, __func__, [=] { function(argument); });
}

Result cuGetErrorName(Result result, const char** name) {
    *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_STAND_IN";
    return kSuccess;
}

Result cuGetErrorString(Result, const char** text) {
    *text = "a failure that a test asked for";
    return kSuccess;
}

// ---- control, for tests ----

// The n-th call from now of `name` ("" for any call) returns `code`; sticky: so does every call after it, and work stops.
void stand_in_fail(const char* name, int n, Result code, bool is_sticky) {
    std::lock_guard lock(mutex);
    (*name ? plans[name] : any_call) = {n, code, is_sticky};
}

// The device breaks by itself, while nobody calls.
void stand_in_break(Result code) { sticky = code; }

void stand_in_delay(int longest_us) { longest_delay_us = longest_us; }
void stand_in_lose_writes(int count) { writes_to_lose = count; }
void stand_in_lose_copies_out(int count) { copies_out_to_lose = count; }
void stand_in_refuse_memory_operations(bool is_refused) { are_memory_operations_refused = is_refused; }

long stand_in_calls(const char* name) {
    std::lock_guard lock(mutex);
    const auto counted = calls.find(std::string_view(name));
    return !*name ? num_calls : counted == calls.end() ? 0 : counted->second;
}

const char* stand_in_failed_call() {
    std::lock_guard lock(mutex);
    return failed_call;
}

long stand_in_live(const char* kind) {
    std::lock_guard lock(mutex);
    const std::string what = kind;
    if (what == "streams") return static_cast<long>(streams.size());
    if (what == "registered") return static_cast<long>(registered.size());
    return static_cast<long>(device_blocks.size() - registered.size());  // allocations
}

int stand_in_violations(char* text, size_t size) {
    std::lock_guard lock(mutex);
    std::string all;
    for (const auto& one : violations) all += one + "\n";
    std::strncpy(text, all.c_str(), size - 1);
    text[size - 1] = 0;
    return static_cast<int>(violations.size());
}

// A kernel: calls `function(argument)` on the stream's thread.
Result stand_in_launch(void* stream, void (*function)(void*), void* argument) {
    return push(stream, "stand_in_launch", [=] { function(argument); });
}

// Where a kernel finds a device range, or null and a violation.
void* stand_in_resolve(Address address, size_t num_bytes) { return behind(address, num_bytes, "a kernel"); }

// Forgets every plan, count and violation. What is live stays live.
void stand_in_reset() {
    std::lock_guard lock(mutex);
    calls.clear();
    plans.clear();
    violations.clear();
    any_call = {};
    failed_call = "";
    num_calls = 0;
    sticky = kSuccess;
    longest_delay_us = 0;
    writes_to_lose = 0;
    copies_out_to_lose = 0;
    are_memory_operations_refused = false;
}

// Gives up all that is live, as the end of a process would; for tests of a device that hangs.
void stand_in_forget() {
    std::lock_guard lock(mutex);
    for (auto& [handle, stream] : streams) {
        std::lock_guard stream_lock(stream->mutex);
        stream->is_ending = true;
        stream->changed.notify_one();
        stream->thread.detach();
        new std::shared_ptr<Stream>(stream);  // its thread may still use it
    }
    streams.clear();
    registered.clear();
    device_blocks.clear();
}

}  // extern "C"
