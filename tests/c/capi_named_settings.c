/* Settings by name, through the C API. */
#include "api/ebbtide_settings.h"

#include "capi_check.h"

static void count_settings(void* user, const ebbtide_setting* setting) {
  CHECK(setting->name[0] && setting->problem[0] == 0);
  ++*(int*)user;
}

int main(void) {
  char text[32];
  size_t length = 0;
  int count = 0;
  EXPECT(EBBTIDE_OK, ebbtide_visit_settings(count_settings, &count, &error));
  CHECK(count > 25);
  REFUSED(ebbtide_visit_settings(NULL, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_check_setting("device_limit", " 2 KiB", 6, NULL, text, sizeof text, &length, &error));
  CHECK(length == 4 && strcmp(text, "2048") == 0);
  EXPECT(EBBTIDE_OK, ebbtide_check_setting("device_limit", "1", 1, "limit", NULL, 0, NULL, &error));
  REFUSED(ebbtide_check_setting("device_limit", "2048", 4, NULL, text, 4, NULL, &error));
  REFUSED(ebbtide_check_setting("device_limits", "1", 1, NULL, NULL, 0, NULL, &error));
  REFUSED(ebbtide_check_setting(NULL, "1", 1, NULL, NULL, 0, NULL, &error));
  REFUSED(ebbtide_check_setting("device_limit", NULL, 0, NULL, NULL, 0, NULL, &error));
  REFUSED(ebbtide_check_setting("device_limit", "lots", 4, "limit", NULL, 0, NULL, &error));
  CHECK(strcmp(error.message, "limit must be a size like \"16GiB\" or \"512MiB\", not 'lots'") == 0);
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_check_setting("disk_directory", "/nowhere", 8, NULL, NULL, 0, NULL, &error));

  EXPECT(EBBTIDE_OK, ebbtide_configure("device_limit", "3MiB", &error));
  CHECK(strcmp(setting_of("device_limit"), "3145728") == 0);
  EXPECT(EBBTIDE_OK, ebbtide_configure("device_limit", NULL, &error));
  CHECK(strcmp(setting_of("device_limit"), "") == 0);
  REFUSED(ebbtide_configure("host_margin", NULL, &error));
  REFUSED(ebbtide_configure("overflow", "split", &error));
  REFUSED(ebbtide_configure("disk_directory", "", &error));
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_configure("disk_directory", "/nowhere", &error));
  REFUSED(ebbtide_get_setting("disk_files", text, 2, &length, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_setting("disk_directory", text, sizeof text, &length, &error));
  CHECK(length == 0); /* nobody configured it */
  REFUSED(ebbtide_get_setting("log", text, sizeof text, &length, &error));
  REFUSED(ebbtide_get_setting(NULL, text, sizeof text, &length, &error));

  EXPECT(EBBTIDE_OK, ebbtide_check_disk_directory("/var/tmp", "named", &error));
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_check_disk_directory("/nowhere", "named", &error));
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_check_disk_directory("/proc/self", "hidden", &error));
  REFUSED(ebbtide_check_disk_directory("/var/tmp", "visible", &error));
  REFUSED(ebbtide_check_disk_directory("", "named", &error));
  REFUSED(ebbtide_check_disk_directory(NULL, "named", &error));
  REFUSED(ebbtide_check_disk_directory("/var/tmp", NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_configure("disk_files", "named", &error));
  EXPECT(EBBTIDE_OK, ebbtide_configure("disk_files", "hidden", &error));
  REFUSED(ebbtide_configure("disk_files", NULL, &error));

  EXPECT(EBBTIDE_OK, ebbtide_check_tag("weights", 7, &error));
  REFUSED(ebbtide_check_tag("a\xe2\x80\x8b", 4, &error));
  REFUSED(ebbtide_check_tag("a\0b", 3, &error));
  REFUSED(ebbtide_check_tag(NULL, 0, &error));
  return report_failures();
}
