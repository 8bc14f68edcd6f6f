//! [`expand_node_list`]: the compressed lists of hosts that Slurm writes.

use thiserror::Error;

/// A fault in a list of nodes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NodeListProblem {
    /// A bracket is opened and not closed, closed and not opened, or opened twice.
    #[error("its brackets do not match")]
    Brackets,
    /// A name is empty.
    #[error("a name in it is empty")]
    EmptyName,
    /// A character cannot be a part of a host name.
    #[error("the character {0:?} is no part of a host name")]
    Character(char),
    /// Text follows the last bracket of a name.
    #[error("the text {0:?} follows a bracket: numbers come last")]
    Suffix(String),
    /// A range is no number and no pair of numbers.
    #[error("the range {0:?} is not N or N-M")]
    Range(String),
    /// A range begins above its end.
    #[error("the range {0:?} is reversed")]
    Reversed(String),
    /// The list has more hosts than a job has tasks.
    #[error("it has more than {} hosts", HOSTS_MAX)]
    TooMany,
}

/// The most hosts of a list: [`ClusterSpec::TASKS_MAX`](crate::cluster::ClusterSpec::TASKS_MAX).
const HOSTS_MAX: usize = crate::cluster::ClusterSpec::TASKS_MAX;

/// Expands a list of hosts, such as `n[1-2],m5,rack[0-1]x[08-09]`, as `scontrol show hostnames`
/// does.
///
/// Several brackets in a name are a product, and the last of them varies first. Numbers keep the
/// width of the first of their range.
///
/// ```
/// use pushpull_common::cluster::resolve::expand_node_list;
/// assert_eq!(expand_node_list("n[08-10],m5")?, ["n08", "n09", "n10", "m5"]);
/// assert_eq!(expand_node_list("r[1-2]x[3-4]")?, ["r1x3", "r1x4", "r2x3", "r2x4"]);
/// # Ok::<(), pushpull_common::cluster::resolve::NodeListProblem>(())
/// ```
///
/// # Errors
/// [`NodeListProblem`]. A list of more than 65,536 hosts is refused before it is expanded.
pub fn expand_node_list(list: &str) -> Result<Vec<String>, NodeListProblem> {
    let mut hosts = Vec::new();
    for name in split_outside_brackets(list)? {
        let expanded = expand_name(name)?;
        if expanded.len() > HOSTS_MAX - hosts.len() {
            return Err(NodeListProblem::TooMany);
        }
        hosts.extend(expanded);
    }
    Ok(hosts)
}

/// Splits a list at the commas between names.
fn split_outside_brackets(list: &str) -> Result<Vec<&str>, NodeListProblem> {
    let mut names = Vec::new();
    let mut is_inside = false;
    let mut begin = 0;
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if !is_inside => is_inside = true,
            b']' if is_inside => is_inside = false,
            b'[' | b']' => return Err(NodeListProblem::Brackets),
            b',' if !is_inside => {
                names.push(&list[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    names.push(&list[begin..]);
    if is_inside { Err(NodeListProblem::Brackets) } else { Ok(names) }
}

/// Expands one name, such as `rack[0-1]x[08-09]`.
fn expand_name(name: &str) -> Result<Vec<String>, NodeListProblem> {
    if name.is_empty() {
        return Err(NodeListProblem::EmptyName);
    }
    let mut hosts = vec![String::new()];
    let mut rest = name;
    while let Some((prefix, bracket)) = rest.split_once('[') {
        let (ranges, after) = bracket.split_once(']').ok_or(NodeListProblem::Brackets)?;
        check_characters(prefix)?;
        let ranges = ranges.split(',').map(Range::read).collect::<Result<Vec<_>, _>>()?;
        let count = ranges.iter().map(Range::count).fold(0u64, u64::saturating_add);
        if count.saturating_mul(hosts.len() as u64) > HOSTS_MAX as u64 {
            return Err(NodeListProblem::TooMany);
        }
        hosts = product(&hosts, prefix, &ranges);
        rest = after;
    }
    check_characters(rest)?;
    match rest.is_empty() || rest.len() == name.len() {
        true => Ok(hosts.into_iter().map(|host| host + rest).collect()),
        false => Err(NodeListProblem::Suffix(rest.to_owned())),
    }
}

fn product(hosts: &[String], prefix: &str, ranges: &[Range]) -> Vec<String> {
    let numbers = || ranges.iter().flat_map(Range::numbers);
    let with = |host: &String| {
        numbers().map(move |number| format!("{host}{prefix}{number}")).collect::<Vec<_>>()
    };
    hosts.iter().flat_map(with).collect()
}

fn check_characters(text: &str) -> Result<(), NodeListProblem> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    match text.chars().find(|&c| !is_part(c)) {
        Some(c) => Err(NodeListProblem::Character(c)),
        None => Ok(()),
    }
}

/// A range of numbers, padded with zeros to a width.
struct Range {
    first: u32,
    last: u32,
    width: usize,
}

impl Range {
    fn read(text: &str) -> Result<Range, NodeListProblem> {
        let malformed = || NodeListProblem::Range(text.to_owned());
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let width = if first.starts_with('0') { first.len() } else { 0 };
        let number = |text: &str| -> Result<u32, NodeListProblem> {
            let is_plain = !text.is_empty()
                && text.len() <= DIGITS_MAX
                && text.bytes().all(|byte| byte.is_ascii_digit());
            let number = is_plain.then(|| text.parse().ok()).flatten();
            number.ok_or_else(malformed)
        };
        let range = Range { first: number(first)?, last: number(last)?, width };
        match range.first <= range.last {
            true => Ok(range),
            false => Err(NodeListProblem::Reversed(text.to_owned())),
        }
    }

    fn count(&self) -> u64 {
        u64::from(self.last - self.first) + 1
    }

    fn numbers(&self) -> impl Iterator<Item = String> + '_ {
        (self.first..=self.last).map(|number| format!("{number:0width$}", width = self.width))
    }
}

/// The most digits of a number, with its zeros.
const DIGITS_MAX: usize = 10;
