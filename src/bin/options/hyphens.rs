//! [`takes_hyphen`]: values that begin with a hyphen, such as negative numbers.

use std::any::TypeId;
use std::path::PathBuf;

use clap::Arg;

/// Lets a flag whose value is parsed take one that begins with a hyphen. Otherwise clap takes `-1`
/// or `-1G` for another flag and cannot report the value. A path or a name may not: it would accept
/// the next flag.
pub(crate) fn takes_hyphen(flag: Arg) -> Arg {
    let found = flag.get_value_parser().type_id();
    let texts = [TypeId::of::<String>(), TypeId::of::<PathBuf>()];
    let is_parsed = flag.get_action().takes_values() && !texts.iter().any(|text| found == *text);
    flag.allow_hyphen_values(is_parsed)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        /// A number
        #[arg(long)]
        number: Option<u32>,
        /// A path
        #[arg(long)]
        path: Option<PathBuf>,
    }

    #[test]
    fn a_value_is_refused_as_such_and_a_path_does_not_take_the_next_flag() {
        let error = |line: [&str; 3]| {
            let command = Line::command().mut_args(takes_hyphen);
            command.try_get_matches_from(line).unwrap_err().to_string()
        };
        let said = error(["line", "--number", "-1G"]);
        assert!(said.contains("invalid value '-1G' for '--number <NUMBER>'"), "{said}");
        let said = error(["line", "--path", "--number"]);
        assert!(said.contains("a value is required for '--path <PATH>'"), "{said}");
    }
}
