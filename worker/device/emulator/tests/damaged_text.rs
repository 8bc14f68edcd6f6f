//! Damages PTX text at random: it is refused or linked, but nothing panics.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::collections::HashMap;

use pushpull_cuda_emulator::ptx::{PtxError, link, parse};
use support::{CORRECT, FAULTY};

/// Links a text as the driver does.
fn load(text: &str) -> Result<(), PtxError> {
    let module = parse(text)?;
    let names = module.variables.iter().map(|variable| (variable.name.clone(), 4096));
    link(&module, &names.collect::<HashMap<_, _>>()).map(|_| ())
}

#[test]
fn damaged_text_does_not_panic() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    assert_eq!(load(FAULTY), Ok(()));
    let mut refused = 0;
    for round in 0..400 {
        let mut bytes = if round % 4 == 0 { CORRECT } else { FAULTY }.as_bytes().to_vec();
        for _ in 0..=next(3) {
            let at = next(bytes.len());
            let length = next(24).min(bytes.len() - at);
            match next(4) {
                0 => drop(bytes.drain(at..at + length)),
                1 => bytes.truncate(at + 1),
                2 => bytes[at] = b"{}()[];,:.%0 $-+@!<>"[next(20)],
                _ => {
                    let part = bytes[at..at + length].to_vec();
                    let to = next(bytes.len());
                    drop(bytes.splice(to..to, part));
                }
            }
        }
        refused += usize::from(load(&String::from_utf8(bytes).unwrap()).is_err());
    }
    assert!(refused > 200, "{refused}");
}

#[test]
fn errors_name_the_line_and_what_is_wrong() {
    let head = ".version 8.0\n.target sm_70\n.address_size 64\n";
    let body =
        |text: &str| format!("{head}.entry k(.param .u64 a)\n{{\n.reg .b32 %r<3>;\n{text}\n}}\n");
    let table = [
        (String::new(), "unsupported target: no .version"),
        (".version 3.0\n".to_owned(), "unsupported target: .version 3"),
        (".version 8.0\n.target sm_20".to_owned(), "unsupported target: .target sm_20"),
        (".version 8.0\n.address_size 32".to_owned(), "unsupported target: .address_size 32"),
        (body("add.u32 %r1, %r2, %r9;"), "line 7: unknown name: %r9"),
        (body("bra $missing;"), "line 7: unknown name: $missing"),
        (body("bar.sync 1;"), "line 7: unknown instruction: bar.sync 1;"),
        (body("wmma.mma.sync %r1;"), "line 7: unknown instruction: wmma.mma.sync %r1;"),
        (
            body("ld.global.v8.u32 %r1, [a];"),
            "line 7: unknown instruction: ld.global.v8.u32 %r1, [a];",
        ),
        (body("add.u32 %r1, %r2 %r2"), "line 8: expected an operand, found Mark('}')"),
        (body("addc.u32;"), "line 7: unknown instruction: addc.u32;"),
        (body("mov.b64 {}, %r1;"), "line 7: unknown instruction: mov.b64 {}, %r1;"),
        (body(".reg .b32 %x<99999999>;"), "line 7: too many registers"),
        (body(".local .b8 x[99999999999999];"), "line 7: variable too large"),
        (body("a: a: ret;"), "line 6: label a is declared twice"),
        (body("call f, (a);"), "line 7: unknown name: f"),
    ];
    for (text, expected) in table {
        let error = load(&text).unwrap_err().to_string();
        assert_eq!(error, expected, "{text}");
    }
}
