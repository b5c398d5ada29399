/* libcuda.so.1 and libcuda.so of the folder simulated/: what `ebbtide run --simulate` puts on the library path. The
 * functions are those of libebbtide_sim.so, which this library needs: dlsym and the loader look there, too. So a
 * process has one simulated device, by whichever name it opens it. */
extern int cuInit(unsigned int flags);

/* An exported use, so that no linker leaves the dependency out: some drop what nothing in the library reads. */
__attribute__((visibility("default"))) int (*const ebbtide_simulated_driver)(unsigned int) = &cuInit;
