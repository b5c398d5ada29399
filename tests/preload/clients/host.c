/* host FLAG LIBRARY WAY ACTION [WORDS]: a program that opens a client as a library. FLAG is local, global or
 * deepbind. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int count, char** words) {
  if (count < 5) return 1;
  int flags = RTLD_NOW;
  if (strcmp(words[1], "global") == 0) flags |= RTLD_GLOBAL;
  if (strcmp(words[1], "deepbind") == 0) flags |= RTLD_DEEPBIND;
  void* library = dlopen(words[2], flags);
  if (library == NULL) {
    fprintf(stderr, "host: %s\n", dlerror());
    return 1;
  }
  int (*run)(int, char**) = (int (*)(int, char**))dlsym(library, "run_client");
  return run == NULL ? 1 : run(count - 3, words + 3);
}
