//! Compares the tables of `docs/protocol.md` with the code. The page must have every message,
//! field, sum, refusal, limit and header field of the code, and no other.

mod page;

use std::collections::BTreeSet;

use page::{PAGE, code};

/// The name of a part of the page, its lines on the page, and its lines in the code.
type PagePart = (&'static str, fn(&str) -> BTreeSet<String>, fn() -> BTreeSet<String>);

const PARTS: [PagePart; 8] = [
    ("header", page::header, code::header),
    ("drawing of the header", page::drawn_header, code::header),
    ("structs", page::structs, code::structs),
    ("sums", page::variants, code::variants),
    ("messages", page::messages, code::messages),
    ("refusals", page::refusals, code::refusals),
    ("limits", page::limits, code::limits),
    ("features", page::features, code::features),
];

/// Returns the differences between a page and the code, one line each.
fn differences(page: &str) -> Vec<String> {
    let of_part = |(name, listed, declared): &PagePart| {
        let listed = listed(page);
        let declared = declared();
        let only = |of: &BTreeSet<String>, other: &BTreeSet<String>, where_: &str| {
            of.difference(other).map(|line| format!("{name}: only {where_}: {line}")).collect()
        };
        let page: Vec<String> = only(&listed, &declared, "on the page");
        let code: Vec<String> = only(&declared, &listed, "in the code");
        [page, code].concat()
    };
    PARTS.iter().flat_map(of_part).collect()
}

#[test]
fn the_protocol_page_matches_the_code() {
    let differences = differences(PAGE);
    assert!(differences.is_empty(), "docs/protocol.md differs:\n{}", differences.join("\n"));
    for (name, listed, _) in PARTS {
        assert!(listed(PAGE).len() > 1, "the page has no {name}");
    }
}

#[test]
fn every_difference_of_the_page_is_found() {
    // A text of the page, its replacement, and the part that is wrong afterwards.
    let changes = [
        ("| 48 | 8 | `sequence` |", "| 40 | 8 | `sequence` |", "header"),
        ("| 60 | 4 | `body_crc` |", "| 60 | 8 | `body_crc` |", "header"),
        ("|  sequence   ", "|  sequences  ", "drawing of the header"),
        ("|  deadline_ms              |", "|  deadline_ms       |", "drawing of the header"),
        ("push_slot `u32`, samples", "push_slot `u64`, samples", "structs"),
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
        ("| `SHARE_REQUESTS_MAX` |", "| `SHARES_MAX` |", "limits"),
        ("| 1 | `goodbye` |", "| 2 | `goodbye` |", "features"),
        ("[read_ahead] ahead", "ahead", "structs"),
    ];
    for (is, was, part) in changes {
        let changed = PAGE.replacen(is, was, 1);
        assert_ne!(changed, PAGE, "{is:?} is not on the page");
        let found = differences(&changed);
        let named = found.iter().any(|line| line.starts_with(&format!("{part}: ")));
        assert!(named, "{was:?} in place of {is:?} is not found: {found:?}");
    }
    // A missing row is found in every table.
    for row in [
        "| 14 | `Ready` |",
        "| 29 | `TableFull` |",
        "| `PUSH_BUFFERS_MAX` |",
        "| 64 | 8 | `auth` |",
    ] {
        let without: Vec<&str> = PAGE.lines().filter(|line| !line.starts_with(row)).collect();
        let without = without.join("\n");
        assert!(without.len() + 1 < PAGE.len(), "{row:?} is not on the page");
        assert_eq!(differences(&without).len(), 1, "the missing row {row:?} is not found");
    }
}
