// What a translated kernel, the scheduler and the checker share.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// The kernel attributes of one thread, named as in MSL.
struct ThreadInfo {
    uint32_t thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3];
    uint32_t threads_per_grid[3];
    uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
};

// Runs once for all threads of a simdgroup that meet at one place: arguments[lane] is null where a lane is not there.
typedef void (*Meeting)(void *const *arguments, uint32_t present);

void sim_threadgroup_barrier(uint32_t flags, uint32_t line);
void sim_simdgroup_barrier(uint32_t flags, uint32_t line);
void sim_meet(Meeting meeting, void *argument, const char *what, uint32_t line, bool all_lanes);
void *sim_threadgroup_memory(uint32_t site, size_t bytes, size_t element_bytes, const char *name);
uint32_t sim_lane();
int sim_matrix_order();
void sim_count_matrix_product();
[[noreturn]] void sim_fail(const char *sentence, uint32_t line);
}

#define SIM_LINE uint32_t line = __builtin_LINE()
#define SIM_UNCHECKED __attribute__((disable_sanitizer_instrumentation, noinline))
