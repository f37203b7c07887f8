/* SPDX-License-Identifier: Apache-2.0
 *
 * What builds without CUDA have in place of kernel.c and limits.c.
 */
#include "tests/bench/kernel.h"

#include <stdio.h>

int kernel_main(int argc, char **argv)
{
    fputs("expert-bench kernel: this build has no CUDA back end\n", stderr);
    return 1;
}

int limits_main(int argc, char **argv)
{
    fputs("expert-bench limits: this build has no CUDA back end\n", stderr);
    return 1;
}
