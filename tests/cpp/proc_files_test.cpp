#include "core/proc_files.h"

#include <gtest/gtest.h>

#include "fake_machine.h"

namespace roundpipe {
namespace {

TEST(ProcFiles, NumbersOrNothing) {
  FakeMachine machine;
  machine.write("/number", "123\n");
  machine.write("/max", "max\n");
  machine.write("/keyed", "anon 5\nfile\ninactive_file 77 kB\nfile 6\n");
  EXPECT_EQ(read_number(machine.root() + "/number"), 123U);
  EXPECT_FALSE(read_number(machine.root() + "/max").has_value());
  EXPECT_FALSE(read_number(machine.root() + "/absent").has_value());
  EXPECT_EQ(read_keyed(machine.root() + "/keyed", "inactive_file"), 77U);
  EXPECT_EQ(read_keyed(machine.root() + "/keyed", "file"), 6U);
  EXPECT_FALSE(read_keyed(machine.root() + "/keyed", "shmem").has_value());
}

}  // namespace
}  // namespace roundpipe
