//! Keeps the root of the facade small: a first program finds its names there, the rest is in
//! modules.

/// The most names at the root of `src/lib.rs`.
const ROOT_NAMES_MAX: usize = 35;

#[test]
fn the_root_of_the_facade_has_few_names() {
    let names = root_names(include_str!("../../src/lib.rs"));
    assert!(names.len() <= ROOT_NAMES_MAX, "{} names: {names:?}", names.len());
    assert!(["Worker", "PsConfig", "optim", "error"].iter().all(|name| names.contains(name)));
}

#[test]
fn names_of_every_form_are_counted() {
    let source = "
        //! pub use a::Doc;
        pub use a::b::{C, d, E as F};
        pub use g::H;
        #[doc(hidden)]
        pub use i;
        pub mod j { pub use k::L; pub fn m() {} }
        pub fn n() {}
        use o::P;
        #[cfg(doctest)]
        pub struct Q;
    ";
    assert_eq!(root_names(source), ["C", "d", "F", "H", "i", "j", "n"]);
}

#[test]
#[should_panic(expected = "glob")]
fn a_glob_hides_its_names() {
    root_names("pub use a::*;");
}

/// Returns the public names at the root of a source file.
///
/// # Panics
/// If a glob hides names, or a `pub use` nests braces.
fn root_names(source: &str) -> Vec<&str> {
    let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut names = Vec::new();
    let mut depth = 0_usize;
    let mut is_cfg = false;
    let mut in_use = false;
    for line in lines.map(str::trim) {
        let item = line.strip_prefix("pub ").filter(|_| depth == 0 && !is_cfg);
        if let Some(item) = item.filter(|item| !item.starts_with("use ")) {
            names.extend(item.split([' ', '(', '<', ';']).nth(1));
        }
        if in_use || item.is_some_and(|item| item.starts_with("use ")) {
            assert!(!line.contains('*'), "a glob hides its names: {line}");
            let list = line.rsplit_once('{').map_or(line, |(_, list)| list);
            let list = list.trim_end_matches(['}', ';', ',']).split(',');
            names.extend(list.filter_map(|path| {
                path.rsplit([' ', ':']).find(|name| !name.is_empty() && *name != "}")
            }));
            in_use = !line.ends_with(';');
        } else {
            depth += line.matches('{').count();
            depth -= line.matches('}').count();
        }
        is_cfg = line.starts_with("#[cfg(doctest)]") || (is_cfg && line.starts_with("#["));
    }
    names
}
