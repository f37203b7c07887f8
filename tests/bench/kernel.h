/* SPDX-License-Identifier: Apache-2.0
 *
 * expert-bench kernel: times the forward sequence of one layer on a GPU, against the floor that its memory and arithmetic set.
 * expert-bench limits: what the GPU and its link reach in this run.
 */
#ifndef EXPERTD_TESTS_BENCH_KERNEL_H
#define EXPERTD_TESTS_BENCH_KERNEL_H

int kernel_main(int argc, char **argv);
int limits_main(int argc, char **argv);

#endif
