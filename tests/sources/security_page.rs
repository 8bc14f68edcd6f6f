//! Checks that every test that the page about security names exists.

use std::fs;
use std::path::{Path, PathBuf};

/// The page.
const PAGE: &str = include_str!("../../docs/security.md");

/// The head of the table.
const HEAD: &str = "| what | shown by |\n";

/// Returns the names of the tests in the table.
fn named(page: &str) -> Vec<&str> {
    let (_, table) = page.split_once(HEAD).expect("the page has the table");
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let cells = rows.map(|row| row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default());
    cells.flat_map(|cell| cell.split(", ").map(|name| name.trim_matches('`'))).collect()
}

/// Returns the source files below a folder that may hold tests.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, files);
        } else if name.ends_with(".rs") {
            files.push(path);
        }
    }
}

#[test]
fn every_test_that_the_page_about_security_names_exists() {
    let mut files = Vec::new();
    sources(Path::new(env!("CARGO_MANIFEST_DIR")), &mut files);
    let text: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let names = named(PAGE);
    assert!(names.len() > 50, "{names:?}");
    let exists = |name: &str| {
        let declared = format!("fn {name}(");
        text.iter().any(|text| text.contains(&declared))
    };
    let absent: Vec<&&str> = names.iter().filter(|name| !exists(name)).collect();
    assert!(absent.is_empty(), "no test is named {absent:?}");
}

#[test]
fn a_test_that_does_not_exist_is_found() {
    let page =
        format!("{HEAD}| --- | --- |\n| a | `one`, `two` |\n| b | `three` |\n\n| c | `four` |\n");
    assert_eq!(named(&page), ["one", "two", "three"]);
}
