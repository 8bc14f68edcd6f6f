//! `docs/protocol.md` says what the code does: its tables have every message, field, refusal and limit
//! that the code has, and none that it has not.

mod page;

use std::collections::BTreeSet;

use page::{PAGE, code};

/// A part of the page, what it says by its tables, and what the code says.
type Part = (&'static str, fn(&str) -> BTreeSet<String>, fn() -> BTreeSet<String>);

const PARTS: [Part; 7] = [
    ("header", page::header, code::header),
    ("drawing of the header", page::drawn_header, code::header),
    ("structs", page::structs, code::structs),
    ("sums", page::variants, code::variants),
    ("messages", page::messages, code::messages),
    ("refusals", page::refusals, code::refusals),
    ("limits", page::limits, code::limits),
];

/// Where a page and the code differ, in lines for a reader.
fn differences(page: &str) -> Vec<String> {
    let of_part = |(name, told, declared): &Part| {
        let (told, declared) = (told(page), declared());
        let only = |of: &BTreeSet<String>, other: &BTreeSet<String>, where_: &str| {
            of.difference(other).map(|line| format!("{name}: only {where_}: {line}")).collect()
        };
        let page: Vec<String> = only(&told, &declared, "on the page");
        let code: Vec<String> = only(&declared, &told, "in the code");
        [page, code].concat()
    };
    PARTS.iter().flat_map(of_part).collect()
}

#[test]
fn the_page_of_the_protocol_is_the_protocol() {
    let differences = differences(PAGE);
    assert!(differences.is_empty(), "docs/protocol.md differs:\n{}", differences.join("\n"));
    for (name, told, _) in PARTS {
        assert!(told(PAGE).len() > 3, "the page has {name}");
    }
}

#[test]
fn a_page_that_differs_is_found() {
    // What is changed on the page, and the part of it that is wrong then.
    let changes = [
        ("| 48 | 8 | `sequence` |", "| 40 | 8 | `sequence` |", "header"),
        ("| 60 | 4 | `body_crc` |", "| 60 | 8 | `body_crc` |", "header"),
        ("|  sequence   ", "|  sequences  ", "drawing of the header"),
        ("|  deadline_ms              |", "|  deadline_ms       |", "drawing of the header"),
        ("step `u64`, push_slot `u32` |", "step `u64`, push_slot `u64` |", "structs"),
        ("2 chief; 3 reader", "3 chief; 2 reader", "sums"),
        ("; 5 held", "", "sums"),
        ("too_old (oldest `u64`)", "too_old (newest `u64`)", "sums"),
        ("`list(16384) u32`", "`list(16385) u32`", "sums"),
        ("| 23 | `ReturnToken` |", "| 25 | `ReturnToken` |", "messages"),
        ("| 34 | `Withdraw` |", "| 34 | `Withdrawn` |", "messages"),
        ("whole `option u64`, next `bool`", "next `bool`, whole `option u64`", "messages"),
        ("kept | 1,048,576 |", "kept | 1,048,577 |", "messages"),
        ("| 28 | `Bucket` |", "| 31 | `Bucket` |", "refusals"),
        ("row `u64`, from `u64`, last", "row `u32`, from `u64`, last", "refusals"),
        ("| 23 | `Denied` | |", "| 23 | `Denied` | kind `u16` |", "refusals"),
        ("| `WINDOW` | 64 |", "| `WINDOW` | 65 |", "limits"),
        ("| `SHARE_REQUESTS_MAX` |", "| `LOANS_MAX` |", "limits"),
    ];
    for (is, was, part) in changes {
        let changed = PAGE.replacen(is, was, 1);
        assert_ne!(changed, PAGE, "{is:?} stands on the page");
        let found = differences(&changed);
        let named = found.iter().any(|line| line.starts_with(&format!("{part}: ")));
        assert!(named, "{is:?} as {was:?} is found: {found:?}");
    }
    // A row that is gone is found wherever it was.
    for row in [
        "| 14 | `Ready` |",
        "| 29 | `TableFull` |",
        "| `PUSH_BUFFERS_MAX` |",
        "| 64 | 8 | `auth` |",
    ] {
        let without: Vec<&str> = PAGE.lines().filter(|line| !line.starts_with(row)).collect();
        let without = without.join("\n");
        assert!(without.len() + 1 < PAGE.len(), "{row:?} stands on the page");
        assert_eq!(differences(&without).len(), 1, "{row:?} is missed");
    }
}
