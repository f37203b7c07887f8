/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU back end's tables and the choice among them: which families are compiled in, which this processor and its kernel can run.
 */
#include "kernels/cpu/family.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* __builtin_cpu_supports looks at XCR0, too: a kernel that doesn't save the registers hides the instructions. */
static bool has_avx2(void)
{
    unsigned a, b, c, d; /* clang's __builtin_cpu_supports doesn't know f16c */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}

static bool has_avx512bf16(void) { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

/* Linux gives tile registers only to processes that asked for them. Idempotent; asking covers every thread. */
static bool has_amx(void)
{
    unsigned a, b, c, d;
    if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1))
        return false;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif

static bool has_generic(void) { return true; }

static enum kernel_status cpu_wait(struct kernel_stream *stream) { return KERNEL_OK; }

#define TABLE(family, auto_rows)                                                                                                           \
    {                                                                                                                                      \
        .name = "cpu-" #family, .device = "cpu", .decode_rows = auto_rows, .dims_init = layout_dims_init,                                  \
        .gate_up_bytes = layout_gate_up_bytes, .down_bytes = layout_down_bytes, .work_bytes = route_work_bytes, .pack_rows = LAYOUT_BLOCK, \
        .span = layout_span, .pack = layout_pack, .lora_a_bytes = layout_lora_a_bytes, .lora_b_bytes = layout_lora_b_bytes,                \
        .pack_lora_a = layout_pack_lora_a, .pack_lora_b = layout_pack_lora_b, .enter = enter_##family, .route = route_step,                \
        .shrink_gate_up = shrink_gate_up_##family, .gate_up = gate_up_##family, .shrink_down = shrink_down_##family,                       \
        .down = down_##family, .combine = combine_##family, .wait = cpu_wait                                                               \
    }

/* Best first. The number is where `auto` changes paths: with AMX prefill is the faster one from about 16 rows on (64 experts, 8 a row)
 * and equal at 8, with the others' fused multiply-add from about 32 on; with fewer experts sooner, which the numbers allow for. Families
 * whose paths are the same code have the same number. */
static const struct {
    const char *isa;
    bool (*available)(void);
    struct kernel_table table;
} families[] = {
#if defined(HAVE_FAMILY_AMX)
    {"amx", has_amx, TABLE(amx, 8)},
#endif
#if defined(HAVE_FAMILY_AVX512BF16)
    {"avx512bf16", has_avx512bf16, TABLE(avx512bf16, 16)},
#endif
#if defined(HAVE_FAMILY_AVX512)
    {"avx512", has_avx512, TABLE(avx512, 16)},
#endif
#if defined(HAVE_FAMILY_AVX2)
    {"avx2", has_avx2, TABLE(avx2, 16)},
#endif
    {"generic", has_generic, TABLE(generic, 16)},
};

#define FAMILIES ((int)(sizeof families / sizeof families[0]))

const char *kernels_cpu_isa(int i) { return i >= 0 && i < FAMILIES ? families[i].isa : NULL; }

const struct kernel_table *kernels_cpu(const char *isa)
{
    bool any = !isa || !strcmp(isa, "auto");
    for (int i = 0; i < FAMILIES; i++)
        if ((any || !strcmp(isa, families[i].isa)) && families[i].available())
            return &families[i].table;
    return NULL;
}
