/* SPDX-License-Identifier: Apache-2.0
 *
 * expert-bench: measurements that check what they measure. `expert-bench load` drives a server over HTTP, `expert-bench kernel` times
 * one layer on a GPU, `expert-bench limits` what that GPU reaches at best.
 */
#include "tests/bench/kernel.h"
#include "tests/bench/load.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc >= 2 && !strcmp(argv[1], "load"))
        return load_main(argc - 1, argv + 1);
    if (argc >= 2 && !strcmp(argv[1], "kernel"))
        return kernel_main(argc - 1, argv + 1);
    if (argc >= 2 && !strcmp(argv[1], "limits"))
        return limits_main(argc - 1, argv + 1);
    bool help = argc == 2 && !strcmp(argv[1], "--help");
    fputs("usage: expert-bench load [OPTIONS]    a running server over HTTP\n"
          "       expert-bench kernel [OPTIONS]  one layer on a GPU, in builds with CUDA\n"
          "       expert-bench limits [OPTIONS]  what that GPU's memory, tensor cores and link reach\n"
          "\n"
          "Each lists its options with --help.\n",
          help ? stdout : stderr);
    return help ? 0 : 2;
}
