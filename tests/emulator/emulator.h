/* SPDX-License-Identifier: Apache-2.0
 *
 * What a test may ask of the emulated device beyond the runtime. By one thread of the host, while no work is under way.
 */
#ifndef EXPERTD_TESTS_EMULATOR_EMULATOR_H
#define EXPERTD_TESTS_EMULATOR_EMULATOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Settles what order threads run in from here on. At a program's start it is $EMULATOR_SEED, or 0. */
void emulator_seed(uint64_t seed);

/* Faults reported so far. A program that met any ends with status 97. */
long emulator_errors(void);

/* Faults from here on are counted apart and not printed, until emulator_expected returns how many they were. first: the text of the first,
 * up to size - 1 bytes of it, when there was one. */
void emulator_expect(void);
long emulator_expected(char *first, size_t size);

#ifdef __cplusplus
}
#endif
#endif
