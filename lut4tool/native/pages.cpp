// A handler of SIGBUS. It may only do what is safe in a signal: it walks a list that never loses an entry, and maps zeros.
#include "pages.h"

#ifndef _WIN32
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace lut4tool {
namespace {

struct Map {
    std::atomic<std::uintptr_t> start{0}, stop{0};  // both 0: free, to be used again
    std::atomic<bool> lost{false};
    Map *next = nullptr;
};

std::atomic<Map *> maps{nullptr};
std::mutex changing;
std::uintptr_t page = 4096;
struct sigaction before;

void on_bus_error(int signal, siginfo_t *info, void *context) {
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    for (Map *map = maps.load(); map != nullptr; map = map->next) {
        const std::uintptr_t start = map->start.load(), stop = map->stop.load();
        if (address < start || address >= stop) continue;
        map->lost.store(true);
        // From the first page that is missing on: what follows it in the file is missing too. The map begins at a page.
        const std::uintptr_t from = start + (address - start) / page * page;
        void *zeros = mmap(reinterpret_cast<void *>(from), stop - from, PROT_READ, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0);
        if (zeros != MAP_FAILED) return;
    }
    if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
        before.sa_sigaction(signal, info, context);
    } else {
        sigaction(SIGBUS, &before, nullptr);  // it happens again, and is theirs
    }
}

}  // namespace

std::size_t watch_pages(const void *start, std::size_t size) {
    const std::lock_guard<std::mutex> lock(changing);
    if (maps.load() == nullptr) {
        page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
        struct sigaction action = {};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO;
        sigemptyset(&action.sa_mask);
        if (sigaction(SIGBUS, &action, &before) != 0) return 0;
    }
    Map *map = maps.load();
    while (map != nullptr && map->stop.load() != 0) map = map->next;
    if (map == nullptr) {
        map = new Map;
        map->next = maps.load();
        maps.store(map);
    }
    const auto first = reinterpret_cast<std::uintptr_t>(start);
    map->lost.store(false);
    map->start.store(first);
    map->stop.store(first + size);
    return reinterpret_cast<std::size_t>(map);
}

void forget_pages(std::size_t map) {
    if (map == 0) return;
    const std::lock_guard<std::mutex> lock(changing);
    reinterpret_cast<Map *>(map)->stop.store(0);
}

bool lost_pages(std::size_t map) { return map != 0 && reinterpret_cast<Map *>(map)->lost.load(); }

}  // namespace lut4tool
#else
namespace lut4tool {
std::size_t watch_pages(const void *, std::size_t) { return 0; }
void forget_pages(std::size_t) {}
bool lost_pages(std::size_t) { return false; }
}  // namespace lut4tool
#endif
