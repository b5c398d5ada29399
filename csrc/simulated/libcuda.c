/* libcuda.so.1 and libcuda.so of the folder simulated/: what `ebbtide run --simulate` puts on the library path. The
 * functions are those of libebbtide_sim.so, which this library needs: dlsym and the loader look there, too. So a
 * process has one simulated device, by whichever name it opens it. */
extern int cuInit(unsigned int flags);

/* A use, so that no linker leaves the dependency out. */
__attribute__((visibility("hidden"), used)) int (*const ebbtide_simulated_driver)(unsigned int) = &cuInit;
