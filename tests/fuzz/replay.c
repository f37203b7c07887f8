/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs a fuzz target over the files of the folders that are named: what a fuzzer found once stays found, with any compiler.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length);

static int replay_file(const char *folder, const char *name)
{
    char path[4096];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        return 1;
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) {
        perror(path);
        return 1;
    }
    long size = ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(size > 0 ? (size_t)size : 1);
    int bad = !bytes || size < 0 || fread(bytes, 1, (size_t)size, file) != (size_t)size;
    fclose(file);
    if (bad)
        perror(path);
    else
        LLVMFuzzerTestOneInput(bytes, (size_t)size);
    free(bytes);
    return bad;
}

int main(int argc, char **argv)
{
    int bad = 0, files = 0;
    for (int i = 1; i < argc; i++) {
        DIR *folder = opendir(argv[i]);
        if (!folder) {
            perror(argv[i]);
            return 1;
        }
        for (struct dirent *entry; (entry = readdir(folder));)
            if (entry->d_name[0] != '.') {
                bad += replay_file(argv[i], entry->d_name);
                files++;
            }
        closedir(folder);
    }
    printf("%d files\n", files);
    return bad || !files;
}
