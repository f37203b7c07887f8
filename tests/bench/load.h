/* SPDX-License-Identifier: Apache-2.0
 *
 * `expert-bench load`: puts a running expertd under load over HTTP and checks what it answers.
 */
#ifndef EXPERTD_TESTS_BENCH_LOAD_H
#define EXPERTD_TESTS_BENCH_LOAD_H

/* argv[0] is "load". Returns the process's exit status: 0, 1 when a reply was wrong or failed or none came, 2 for bad usage. */
int load_main(int argc, char **argv);

#endif
