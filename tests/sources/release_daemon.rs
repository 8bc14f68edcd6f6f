//! Checks that a release daemon has no door of the tests, however features were unified.
//!
//! The names of functions are in the section `.strtab` of an ELF file, and the paths of files that
//! can panic in `.rodata`, also where a function is inlined. The sections of debuggers name types
//! that no code uses, and are left out.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Names of doors, as parts of the names of functions and of the paths of files.
const DOORS: &[&str] = &[
    "adversary",
    "check_invariants",
    "check_unchanged",
    "check_waits",
    "cuda_emulator",
    "invariants.rs",
    "PUSHPULL_TEST_CREDENTIALS",
    "planted",
    "Planted",
    "shard_endpoint",
    "simulation",
    "store_trace",
    "test_files",
    "testing",
];

/// The variable that names a daemon that must exist. Without it the daemon beside the build of the
/// tests is checked, if there is one.
const DAEMON: &str = "PUSHPULL_RELEASE_DAEMON";

/// Returns the contents of a section of a 64-bit ELF file; `None` if there is none.
fn section<'a>(file: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let number = |at: usize, bytes: usize| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(&file[at..at + bytes]);
        u64::from_le_bytes(word) as usize
    };
    let first = number(0x28, 8);
    let header_bytes = number(0x3a, 2);
    let count = number(0x3c, 2);
    let contents = |section: usize| {
        let header = first + section * header_bytes;
        let start = number(header + 0x18, 8);
        (number(header, 4), start..start + number(header + 0x20, 8))
    };
    let names = &file[contents(number(0x3e, 2)).1];
    let is_named = |at: usize| names[at..].split(|&byte| byte == 0).next() == Some(name.as_bytes());
    (0..count).map(contents).find(|(at, _)| is_named(*at)).map(|(_, range)| &file[range])
}

/// Returns the doors that a program has.
fn doors(program: &Path) -> Vec<&'static str> {
    let file = fs::read(program).unwrap_or_else(|error| panic!("{program:?}: {error}"));
    let text = [".strtab", ".rodata"].map(|name| {
        let bytes = section(&file, name);
        String::from_utf8_lossy(bytes.unwrap_or_else(|| panic!("{program:?} has no {name}")))
    });
    assert!(text[0].contains("pushpull_ps"), "{program:?} has no names of functions");
    DOORS.iter().copied().filter(|door| text.iter().any(|text| text.contains(door))).collect()
}

#[test]
fn a_release_daemon_has_no_doors() {
    let tested = Path::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    if cfg!(debug_assertions) {
        let found = doors(tested);
        let expected = ["PUSHPULL_TEST_CREDENTIALS", "invariants.rs", "test_files", "testing"];
        assert!(
            expected.iter().all(|door| found.contains(door)),
            "the daemon of the tests has doors, and only {found:?} are found"
        );
    }
    let beside = || tested.ancestors().nth(2).unwrap().join("release/pushpull-ps");
    let named = env::var_os(DAEMON).map(PathBuf::from);
    let must_exist = named.is_some();
    let daemon = named.unwrap_or_else(beside);
    if !must_exist && !daemon.exists() {
        println!("SKIPPED: no release daemon is searched for doors, there is no {daemon:?}");
        return;
    }
    let found = doors(&daemon);
    assert!(found.is_empty(), "{daemon:?} has {found:?}; if it is old, build it again");
}
