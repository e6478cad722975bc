// LUT4TOOL_CLONES: the compiler makes a loop for each of the processor's generations, and the loader picks one.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define LUT4TOOL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LUT4TOOL_CLONES
#endif
