/* SPDX-License-Identifier: Apache-2.0
 *
 * What promise 1 says of a problem's output.
 */
#ifndef EXPERTD_TESTS_KERNEL_RULE_H
#define EXPERTD_TESTS_KERNEL_RULE_H

#include "problem.h"

/* [rows, hidden], to free(). The problem's input must be finite. */
double *rule_forward(const struct problem *p);

#endif
