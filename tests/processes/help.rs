//! The help of the binaries: each flag is under a heading and explained in one line.

use std::process::Command;

const DAEMON: &str = env!("CARGO_BIN_EXE_pushpull-ps");
const TOOL: &str = env!("CARGO_BIN_EXE_pushpull");

/// Maximum width of a line.
const COLUMNS: usize = 120;

fn help(program: &str, command: &[&str]) -> String {
    let output = Command::new(program).args(command).arg("--help").output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the headings of a help text, each with the lines below it.
fn sections(help: &str) -> Vec<(&str, Vec<&str>)> {
    let mut sections = vec![("", Vec::new())];
    for line in help.lines().filter(|line| !line.is_empty()) {
        match line.strip_suffix(':') {
            Some(heading) if !line.starts_with(' ') => sections.push((heading, Vec::new())),
            _ => sections.last_mut().unwrap().1.push(line),
        }
    }
    sections
}

/// Returns the faults of a help text, and the number of its flags.
fn check(help: &str) -> (Vec<String>, usize) {
    let mut faults = Vec::new();
    let mut flags = 0;
    for (heading, lines) in sections(help) {
        let is_flag = |line: &str| line.trim_start().starts_with('-');
        if heading == "Policies" || !lines.iter().any(|line| is_flag(line)) {
            continue;
        }
        for line in lines {
            let (flag, text) = line.trim_start().split_once("  ").unwrap_or((line, ""));
            let is_general = flag.ends_with("--help") || flag.ends_with("--version");
            if !is_flag(line) || text.trim().is_empty() || line.len() > COLUMNS {
                faults.push(format!("not one line of help: {line:?}"));
            }
            if heading == "Options" && !is_general {
                faults.push(format!("no heading: {line:?}"));
            }
            flags += usize::from(is_flag(line));
        }
    }
    (faults, flags)
}

/// Returns the subcommands that a help text lists.
fn subcommands(help: &str) -> Vec<&str> {
    let sections = sections(help);
    let commands = sections.iter().find(|(heading, _)| *heading == "Commands");
    let lines = commands.map_or(&[][..], |(_, lines)| lines).iter();
    lines.filter_map(|line| line.split_whitespace().next()).filter(|&name| name != "help").collect()
}

#[test]
fn every_flag_has_a_heading_and_one_line_of_help() {
    let tool = help(TOOL, &[]);
    let commands = subcommands(&tool);
    assert_eq!(
        commands,
        [
            "admin",
            "bench",
            "cert",
            "devices",
            "export",
            "inspect",
            "launch",
            "rendezvous",
            "resolve",
            "token"
        ]
    );
    let (faults, flags) = check(&help(DAEMON, &[]));
    assert_eq!((faults, flags > 50), (vec![], true), "{flags} flags of the daemon");
    let mut flags = check(&tool).1;
    for command in commands {
        let (faults, of_command) = check(&help(TOOL, &[command]));
        assert_eq!(faults, Vec::<String>::new(), "{command}");
        flags += of_command;
    }
    for nested in [
        ["admin", "status"],
        ["admin", "save"],
        ["admin", "finish"],
        ["admin", "stop"],
        ["cert", "new-ca"],
        ["cert", "new"],
        ["token", "new"],
    ] {
        let (faults, of_command) = check(&help(TOOL, &nested));
        assert_eq!(faults, Vec::<String>::new(), "{nested:?}");
        flags += of_command;
    }
    assert!(flags > 30, "{flags} flags of the tool");
}

#[test]
fn a_flag_without_heading_or_with_two_lines_is_found() {
    let help = "Usage: x\n\nOptions:\n      --loose <N>  Text\n  -h, --help       Print help\n\n\
                Network:\n      --long <N>  Text\n                  more\n      --bare <N>\n";
    let (faults, flags) = check(help);
    let expected = ["no heading: ", "not one line of help: ", "not one line of help: "];
    let starts = faults.iter().zip(expected).all(|(fault, start)| fault.starts_with(start));
    assert!(starts && (faults.len(), flags) == (3, 4), "{faults:?}, {flags}");
}
