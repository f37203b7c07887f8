/* SPDX-License-Identifier: Apache-2.0
 *
 * The checks that every kernel table must pass, whatever its device: step by step against the reference, and the promises that
 * can be checked bit by bit. A test program makes a target and hands it over.
 */
#ifndef EXPERTD_TESTS_KERNEL_CASES_H
#define EXPERTD_TESTS_KERNEL_CASES_H

#include "body.h"

/* Each fails the cmocka test that runs it. */
void cases_check_steps(const struct body_target *target); /* every entry alone, fed with the reference's intermediate results */
void cases_check_forward(const struct body_target *target); /* the whole sequence, decode against prefill against the reference */
void cases_check_rule(const struct body_target *target); /* rounding happens at the promised points and nowhere else */
void cases_check_company(const struct body_target *target); /* each row alone, in windows, reversed and in company: same bits */
void cases_check_base(const struct body_target *target); /* unadapted rows with and without adapters: same bits */
void cases_check_sums(const struct body_target *target); /* base rows' sums have one order, alone, in company and beside adapters */
void cases_check_nan(const struct body_target *target); /* NaN and infinities stay in their rows */
void cases_check_large(const struct body_target *target); /* batches that fill the tiles of a device with many threads */
void cases_check_order(const struct body_target *target); /* combine sums in slot order */
/* Forwards in a row, with adapters and without, give the bits of one that waits after every step. */
void cases_check_stream(const struct body_target *target);
/* The same for so many seconds, of shapes that keep a device busy: what goes wrong once in a thousand times. */
void cases_soak(const struct body_target *target, double seconds);
/* Another target of the same table (other threads, other tiles): same bits as `target`. */
void cases_check_same(const struct body_target *target, const struct body_target *other);
/* Prints the time of each step. */
void cases_bench(const struct body_target *target);

#endif
