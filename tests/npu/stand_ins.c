/* A device runtime in host memory, enough for torch_npu to start and to pretend NPUs.
 *
 * stand_ins.py puts `#define SOC` before this text and generated entry points after it. Only the
 * calls that torch_npu makes to start, to keep memory and to launch kernels are answered here.
 * Everything is done as soon as it is asked for; a kernel computes nothing.
 *
 * Environment: NPU_STUB_DEVICES=N (0 by default) is how many devices there are, NPU_STUB_SOC their
 * name, NPU_STUB_LOG=FILE gets a line for each kernel launched, NPU_STUB_TRACE=1 tells on stderr
 * of calls that nothing answers.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, BAD_DEVICE = 107001, NO_CONTEXT = 107002, NO_MEMORY = 207001, NOT_HERE = 500000 };
enum { CORES = 24, ALIGNMENT = 512 };

#define SUCCEED(name) int name() { return OK; }

static __thread int current_device;
static char context;

static int devices(void) {
  const char *number = getenv("NPU_STUB_DEVICES");
  return number ? atoi(number) : 0;
}

static void *zeros(size_t bytes) {
  void *memory = NULL;
  bytes = bytes ? bytes : 1;
  if (posix_memalign(&memory, ALIGNMENT, bytes)) return NULL;
  return memset(memory, 0, bytes);
}

static int give(void **into, size_t bytes) {
  return (*into = zeros(bytes)) ? OK : NO_MEMORY;
}

int npu_stub_missing(const char *name) {
  if (getenv("NPU_STUB_TRACE")) fprintf(stderr, "[npu stand-in] nothing answers %s\n", name);
  return NOT_HERE;
}

/* Start, devices, contexts. */
SUCCEED(aclInit)
SUCCEED(aclFinalize)
SUCCEED(aclrtSetCurrentContext)
SUCCEED(aclrtResetDevice)
SUCCEED(aclrtSynchronizeDevice)
SUCCEED(aclrtSynchronizeDeviceWithTimeout)
SUCCEED(aclrtDeviceEnablePeerAccess)
SUCCEED(aclrtSetOpWaitTimeout)
SUCCEED(aclrtSetOpExecuteTimeOut)
SUCCEED(aclrtSetDeviceSatMode)
SUCCEED(aclSetCompileopt)
SUCCEED(aclrtCtxSetSysParamOpt)
SUCCEED(aclrtSetSysParamOpt)
SUCCEED(MsprofRegisterCallback)
SUCCEED(MsprofReportApi)
void aclAppLog(void) {}
uint64_t MsprofGetHashId(const char *text, size_t length) { return 1; }
const char *aclGetRecentErrMsg(void) { return "the stand-in for CANN has no such function"; }

const char *aclrtGetSocName(void) {
  const char *name = getenv("NPU_STUB_SOC");
  return name ? name : SOC;
}

int aclrtGetDeviceCount(uint32_t *count) { *count = devices(); return OK; }

int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= devices()) return BAD_DEVICE;
  current_device = device;
  return OK;
}

int aclrtGetDevice(int32_t *device) {
  *device = current_device;
  return devices() ? OK : NO_CONTEXT;
}

int aclrtGetCurrentContext(void **into) {
  *into = &context;
  return devices() ? OK : NO_CONTEXT;
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  *active = devices() > 0;
  return OK;
}

int aclGetDeviceCapability(uint32_t device, int what, int64_t *value) { *value = CORES; return OK; }
int aclrtGetDeviceInfo(uint32_t device, int what, int64_t *value) { *value = CORES; return OK; }
int aclrtGetResInCurrentThread(int what, uint32_t *value) { *value = CORES; return OK; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { *can = 1; return OK; }
int aclrtDeviceGetBareTgid(int32_t *process) { *process = getpid(); return OK; }
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return OK; }
int aclGetCompileoptSize(int option) { return 64; }
int aclGetCompileopt(int option, char *value, size_t length) {
  if (length) *value = 0;
  return OK;
}

/* Streams and events: handles of work that is already done. */
int aclrtCreateStream(void **stream) { return give(stream, 8); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t p, uint32_t f) { return give(stream, 8); }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return give(event, 8); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return give(event, 8); }
int aclrtStreamQuery(void *stream, int *state) { *state = 0; return OK; }
int aclrtStreamGetId(void *stream, int32_t *number) { *number = 0; return OK; }
int aclrtQueryEventStatus(void *event, int *state) { *state = 1; return OK; }
int aclrtQueryEventWaitStatus(void *event, int *state) { *state = 0; return OK; }
int aclrtEventElapsedTime(float *ms, void *a, void *b) { *ms = 0; return OK; }
SUCCEED(aclrtDestroyStream)
SUCCEED(aclrtDestroyStreamForce)
SUCCEED(aclrtSynchronizeStream)
SUCCEED(aclrtSynchronizeStreamWithTimeout)
SUCCEED(aclrtSetStreamFailureMode)
SUCCEED(aclrtSetStreamOverflowSwitch)
SUCCEED(aclrtSetStreamAttribute)
SUCCEED(aclrtDestroyEvent)
SUCCEED(aclrtRecordEvent)
SUCCEED(aclrtResetEvent)
SUCCEED(aclrtStreamWaitEvent)
SUCCEED(aclrtSynchronizeEvent)

/* Memory: the device's is the host's, and starts as zeros. */
int aclrtMalloc(void **p, size_t bytes, int policy) { return give(p, bytes); }
int aclrtMallocAlign32(void **p, size_t bytes, int policy) { return give(p, bytes); }
int aclrtMallocHost(void **p, size_t bytes) { return give(p, bytes); }
int aclrtMallocHostWithCfg(void **p, uint64_t bytes, void *c) { return give(p, bytes); }
int aclrtFree(void *p) { free(p); return OK; }
int aclrtFreeHost(void *p) { free(p); return OK; }

int aclrtGetMemInfo(int which, size_t *available, size_t *total) {
  *available = *total = (size_t)8 << 30;
  return OK;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
  memmove(to, from, bytes);
  return OK;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *s) {
  return aclrtMemcpy(to, room, from, bytes, kind);
}

int aclrtMemset(void *p, size_t room, int32_t value, size_t bytes) {
  memset(p, value, bytes);
  return OK;
}

int aclrtMemsetAsync(void *p, size_t room, int32_t value, size_t bytes, void *s) {
  return aclrtMemset(p, room, value, bytes);
}

/* What a kernel is given: handles; the shapes of tensors are kept for the log. */
static __thread char given[8192];

static const char *type_name(int type) {
  static const char *names[] = {"f32", "f16", "i8",  "i32", "u8",  "?",   "i16",
                                "u16", "u32", "i64", "u64", "f64", "bool"};
  if (type == 27) return "bf16";
  return type >= 0 && type < 13 ? names[type] : "?";
}

/* The compiler evaluates an aclnn call's conversions from the last to the first, hence `first`. */
static void *note(int first, const char *name, const int64_t *sizes, uint64_t count) {
  char text[sizeof given];
  int end = snprintf(text, 512, " %s[", name);
  for (uint64_t i = 0; i < count && end < 480; i++)
    end += snprintf(text + end, 512 - end, i ? ",%lld" : "%lld", (long long)sizes[i]);
  end += snprintf(text + end, 512 - end, "]");
  if (end + strlen(given) < sizeof given) {
    if (first) strcpy(given, strcat(text, given));
    else strcat(given, text);
  }
  return zeros(8);
}

int npu_stub_launch(const char *kernel) {
  const char *path = getenv("NPU_STUB_LOG");
  FILE *log = path ? fopen(path, "a") : NULL;
  if (log) {
    fprintf(log, "%s%s\n", kernel, given);
    fclose(log);
  }
  given[0] = 0;
  return OK;
}

void *aclCreateTensor(const int64_t *sizes, uint64_t count, int type, const int64_t *strides,
                      int64_t offset, int format, const int64_t *stored, uint64_t m, void *p) {
  return note(1, type_name(type), sizes, count);
}
void *aclCreateIntArray(const int64_t *v, uint64_t n) { return note(1, "ints", v, n); }
void *aclCreateScalar(void *value, int type) { return zeros(8); }
void *aclCreateFloatArray(const float *v, uint64_t n) { return zeros(8); }
void *aclCreateBoolArray(const char *v, uint64_t n) { return zeros(8); }
void *aclCreateTensorList(void *v, uint64_t n) { return zeros(8); }
void *aclCreateScalarList(void *v, uint64_t n) { return zeros(8); }

#define DESTROY(what) int aclDestroy##what(void *p) { free(p); return OK; }
DESTROY(Tensor)
DESTROY(Scalar)
DESTROY(IntArray)
DESTROY(FloatArray)
DESTROY(BoolArray)
DESTROY(TensorList)
DESTROY(ScalarList)
DESTROY(DataBuffer)

/* The older way to a kernel, by its name; a few operators still take it. */
void *aclCreateTensorDesc(int type, int count, const int64_t *sizes, int format) {
  return note(0, type_name(type), sizes, count);
}
void *aclCreateDataBuffer(void *data, size_t bytes) { return zeros(8); }
void *aclopCreateAttr(void) { return zeros(8); }
void aclopDestroyAttr(void *p) { free(p); }
void aclDestroyTensorDesc(void *p) { free(p); }
void aclSetTensorDescName(void *p, const char *name) {}
SUCCEED(aclSetTensorFormat)
SUCCEED(aclSetTensorShape)
SUCCEED(aclSetTensorPlaceMent)
SUCCEED(aclopSetAttrBool)
SUCCEED(aclopSetAttrDataType)
SUCCEED(aclopSetAttrFloat)
SUCCEED(aclopSetAttrInt)
SUCCEED(aclopSetAttrString)
SUCCEED(aclopSetAttrListBool)
SUCCEED(aclopSetAttrListFloat)
SUCCEED(aclopSetAttrListInt)
SUCCEED(aclopSetAttrListListInt)

int aclopCompileAndExecute(const char *kernel) {
  char name[128];
  snprintf(name, sizeof name, "aclop:%s", kernel);
  return npu_stub_launch(name);
}
