// A function that std::vector calls since GCC 11 and that only libstdc++ 11 and later export. Defined here, the library
// runs with the libstdc++ of GCC 7 and later (manylinux_2_27).
#include <new>

#ifdef __GLIBCXX__
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
