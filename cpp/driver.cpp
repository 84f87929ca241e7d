#include "driver.h"

#include <dlfcn.h>

namespace tensorrt_llm_ext {

template <class Self, class Visit>
void Driver::for_each_entry(Self& self, Visit visit) {
    visit(self.cuInit, true);
    visit(self.cuDriverGetVersion, true);
    visit(self.cuDeviceGet, true);
    visit(self.cuDevicePrimaryCtxRetain, true);
    visit(self.cuCtxPushCurrent, true);
    visit(self.cuCtxPopCurrent, true);
    visit(self.cuStreamCreate, true);
    visit(self.cuStreamDestroy, true);
    visit(self.cuStreamQuery, true);
    visit(self.cuMemHostRegister, true);
    visit(self.cuMemHostUnregister, true);
    visit(self.cuMemHostGetDevicePointer, true);
    visit(self.cuMemAlloc, true);
    visit(self.cuMemFree, true);
    visit(self.cuMemGetInfo, true);
    visit(self.cuMemcpyHtoDAsync, true);
    visit(self.cuMemcpyDtoHAsync, true);
    visit(self.cuStreamWriteValue32, false);  // where these two are missing the doorbell uses cuLaunchHostFunc
    visit(self.cuStreamWaitValue32, false);
    visit(self.cuLaunchHostFunc, true);
    visit(self.cuGetErrorName, true);
    visit(self.cuGetErrorString, true);
}

Driver::Driver(const std::string& path, int device) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        throw Error(Kind::backend, "the CUDA driver cannot be opened", "a library that loads at '" + path + "'", dlerror(),
                    "install the driver, or use an engine of a backend that runs on the CPU");
    }
    for_each_entry(*this, [&](auto& entry, bool is_needed) {
        entry.function = reinterpret_cast<decltype(entry.function)>(dlsym(library, entry.name));
        if (!entry.function && is_needed) {
            throw Error(Kind::backend, "the CUDA driver at '" + path + "' is too old or is none", std::string("the entry point ") + entry.name,
                        "no such symbol", "install a driver for CUDA 12 or newer");
        }
    });
    DRIVER_TRY(*this, cuInit, 0u);
    DRIVER_TRY(*this, cuDriverGetVersion, &version_);
    DRIVER_TRY(*this, cuDeviceGet, &device, device);
    DRIVER_TRY(*this, cuDevicePrimaryCtxRetain, &context_, device);
}

std::map<std::string, uint64_t> Driver::calls() const {
    std::map<std::string, uint64_t> calls;
    for_each_entry(*this, [&](const auto& entry, bool) { calls[entry.name] = entry.num_calls; });
    return calls;
}

std::string Driver::describe(Result result) const {
    const char* name = nullptr;
    const char* text = nullptr;
    if (cuGetErrorName(result, &name) != kSuccess || !name) name = "unknown CUresult";
    if (cuGetErrorString(result, &text) != kSuccess || !text) text = "the driver has no text for it";
    return std::string(name) + " (" + std::to_string(result) + "): " + text;
}

void Driver::fail(const char* file, int line, const std::string& call, Result result) const {
    const std::string path(file);
    const std::string place = path.substr(path.rfind('/') + 1) + ":" + std::to_string(line);
    const bool is_memory = result == kOutOfMemory;
    throw Error(is_memory ? Kind::memory : Kind::backend, call + " failed at " + place, "CUDA_SUCCESS", describe(result),
                is_memory ? "close what else uses this device, or build the engine with smaller limits"
                          : "see the driver's log (dmesg, nvidia-smi); open a new session, in a new process after a device error");
}

}  // namespace tensorrt_llm_ext
