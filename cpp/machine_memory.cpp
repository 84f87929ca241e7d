#include "machine_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace tensorrt_llm_ext {

namespace {

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

// The number that follows `key` in a file of words; `otherwise` when there is none.
size_t number_after(const std::string& path, const std::string& key, size_t otherwise) {
    std::ifstream file(path);
    for (std::string word; file >> word;) {
        size_t value;
        if (word == key && file >> value) return value;
    }
    return otherwise;
}

// The single number in a file; `otherwise` when the file is missing or says "max".
size_t number_in(const std::string& path, size_t otherwise) {
    std::ifstream file(path);
    size_t value;
    return file >> value ? value : otherwise;
}

size_t free_in_group(const std::string& folder, const char* limit_file, const char* used_file, const char* droppable_key) {
    const size_t limit = number_in(folder + limit_file, kUnlimited);
    if (limit == kUnlimited) return kUnlimited;
    size_t used = number_in(folder + used_file, 0);
    used -= std::min(used, number_after(folder + "memory.stat", droppable_key, 0));
    return limit - std::min(limit, used);
}

// This process's group in the unified hierarchy: "/" inside a container, longer on a plain machine.
std::string own_group() {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("0::/", 0) == 0) return line.substr(3);
    }
    return "/";
}

}  // namespace

size_t free_memory() {
    const size_t available = number_after("/proc/meminfo", "MemAvailable:", kUnlimited / 1024);  // kB
    size_t free = available * 1024;
    for (std::string group = own_group();; group = group.substr(0, group.rfind('/'))) {  // a parent's limit holds too
        const std::string folder = "/sys/fs/cgroup" + group + "/";
        free = std::min(free, free_in_group(folder, "memory.max", "memory.current", "inactive_file"));
        if (group.empty() || group == "/") break;
    }
    return std::min(free, free_in_group("/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                        "total_inactive_file"));
}

}  // namespace tensorrt_llm_ext
