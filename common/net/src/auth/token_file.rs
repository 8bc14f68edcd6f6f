//! The file of access tokens: who may connect, and what each may do.
//!
//! One entry a line. Empty lines, and those that begin with `#`, say nothing.
//!
//! ```text
//! token trainers-1 8f0c...  roles=worker,chief tasks=/job:worker/task:*
//! token caller-1   51d2...  roles=client functions=eval*
//! certificate /job:ps/task:* roles=peer
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use pushpull_common::access::{AccessRights, Principal, Roles, UnknownRole};
use pushpull_common::ids::TaskId;
use pushpull_common::names::NamePattern;
use pushpull_common::protocol::limits::ACCESS_TOKEN_NAME_BYTES_MAX;
use pushpull_common::protocol::message::Role;
use thiserror::Error;

use super::secret::{Secret, SecretError};

/// A named secret, and what it gives.
#[derive(Debug, PartialEq, Eq)]
pub struct AccessToken {
    /// Its name, which is not secret.
    pub name: String,
    /// Its secret.
    pub secret: Secret,
    /// Who proves that it knows the secret.
    pub principal: Arc<Principal>,
}

/// The rights of the certificates whose names match a pattern.
#[derive(Debug, PartialEq, Eq)]
struct CertificateRights {
    names: NamePattern,
    rights: AccessRights,
}

/// Who may connect, and what each may do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AccessList {
    /// In the order of the file.
    tokens: Vec<Arc<AccessToken>>,
    by_name: BTreeMap<String, usize>,
    certificates: Vec<CertificateRights>,
}

impl AccessList {
    /// The most entries of a list.
    pub const ENTRIES_MAX: usize = 10_000;

    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`AccessListError`], which displays nothing of a secret.
    pub fn parse(text: &str) -> Result<AccessList, AccessListError> {
        let mut list = AccessList::default();
        let mut lines: BTreeMap<String, usize> = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let fault = |fault| AccessListError::Line { line: line_number, fault };
            let entry = line.trim();
            if entry.is_empty() || entry.starts_with('#') {
                continue;
            }
            if lines.len() == AccessList::ENTRIES_MAX {
                return Err(fault(EntryFault::TooMany));
            }
            let (kind, rest) = entry.split_once(char::is_whitespace).unwrap_or((entry, ""));
            let mut words = rest.split_whitespace();
            let name = words.next().unwrap_or_default();
            match kind {
                "token" => {
                    check_name(name).map_err(fault)?;
                    let secret = Secret::from_hex(words.next().unwrap_or_default());
                    let secret = secret.map_err(|source| fault(EntryFault::Secret { source }))?;
                    let (rights, known_as) = rights(words).map_err(fault)?;
                    let known_as = known_as.unwrap_or(name).to_owned();
                    let principal = Arc::new(Principal { name: known_as, rights });
                    list.by_name.insert(name.to_owned(), list.tokens.len());
                    list.tokens.push(Arc::new(AccessToken {
                        name: name.to_owned(),
                        secret,
                        principal,
                    }));
                }
                "certificate" => {
                    if name.is_empty() || name.contains('=') {
                        return Err(fault(EntryFault::Pattern));
                    }
                    let (rights, known_as) = rights(words).map_err(fault)?;
                    if known_as.is_some() {
                        return Err(fault(EntryFault::Key));
                    }
                    list.certificates.push(CertificateRights { names: name.into(), rights });
                }
                // The word may be a secret.
                _ => return Err(fault(EntryFault::Kind)),
            }
            if let Some(first) = lines.insert(format!("{kind} {name}"), line_number) {
                return Err(fault(EntryFault::Again { name: name.to_owned(), first }));
            }
        }
        match lines.is_empty() {
            true => Err(AccessListError::Empty),
            false => Ok(list),
        }
    }

    /// Returns the list of one token, whose owner may do everything.
    pub(crate) fn of_one(name: &str, secret: Secret) -> AccessList {
        let functions = vec![NamePattern::from("*")];
        let rights = AccessRights { roles: Roles::all(), functions, ..AccessRights::default() };
        let principal = Arc::new(Principal { name: name.to_owned(), rights });
        let token = AccessToken { name: name.to_owned(), secret, principal };
        AccessList {
            tokens: vec![Arc::new(token)],
            by_name: BTreeMap::from([(name.to_owned(), 0)]),
            certificates: Vec::new(),
        }
    }

    /// Returns the tokens, in the order of the file.
    pub fn tokens(&self) -> &[Arc<AccessToken>] {
        &self.tokens
    }

    /// Returns the token of this name.
    pub fn token(&self, name: &str) -> Option<&Arc<AccessToken>> {
        self.by_name.get(name).map(|&index| &self.tokens[index])
    }

    /// Returns the first token by which this task may connect in a role.
    pub fn own_token(&self, role: Role, task: &TaskId) -> Option<&Arc<AccessToken>> {
        self.tokens.iter().find(|token| token.principal.rights.permit(role, task))
    }

    /// Returns what the owner of a certificate with these names may do, by the first entry that
    /// matches one. An entry that names no tasks gives those of the certificate.
    pub fn certificate(&self, names: &[String]) -> Option<Principal> {
        self.certificates.iter().find_map(|of| {
            let name = names.iter().find(|name| of.names.matches(name))?;
            let mut rights = of.rights.clone();
            if rights.tasks.is_empty() {
                rights.tasks = tasks_of(names);
            }
            Some(Principal { name: name.clone(), rights })
        })
    }
}

/// Returns who the owner of a certificate with these names is.
///
/// Without an entry in the list, a certificate that names tasks is these tasks, in every role of a
/// task: its server refuses those that do not suit it. The first task of a job may be the chief.
#[cfg(feature = "tls")]
pub(crate) fn owner_of(names: &[String], list: Option<&AccessList>) -> Option<Principal> {
    list.and_then(|list| list.certificate(names)).or_else(|| {
        let tasks = tasks_of(names);
        let name = tasks.first()?.to_string();
        let roles = [Role::Worker {}, Role::Peer {}, Role::Rank {}, Role::Task {}];
        let roles = roles.into_iter().fold(Roles::default(), Roles::with);
        let rights = AccessRights { roles, tasks, first_is_chief: true, ..AccessRights::default() };
        Some(Principal { name, rights })
    })
}

/// Returns the tasks among the names of a certificate. A star stands for any index.
pub(crate) fn tasks_of(names: &[String]) -> Vec<NamePattern> {
    let tasks = names.iter().filter(|name| name.starts_with("/job:"));
    tasks.map(|name| NamePattern::from(name.as_str())).collect()
}

/// Checks the text of a file of access tokens.
///
/// # Errors
/// [`AccessListError`], which displays nothing of a secret.
pub fn check_tokens(text: &str) -> Result<(), AccessListError> {
    AccessList::parse(text).map(drop)
}

fn check_name(name: &str) -> Result<(), EntryFault> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let fits = (1..=ACCESS_TOKEN_NAME_BYTES_MAX).contains(&name.len());
    match fits && name.bytes().all(is_plain) {
        true => Ok(()),
        false => Err(EntryFault::Name),
    }
}

/// Reads `roles=`, `tasks=`, `functions=`, `connections=` and `as=`, each once at most. Returns the
/// rights, and the name of the principal if the token is one of several.
fn rights<'a>(
    words: impl Iterator<Item = &'a str>,
) -> Result<(AccessRights, Option<&'a str>), EntryFault> {
    let mut rights = AccessRights::default();
    let mut known_as = None;
    let patterns = |text: &str| text.split(',').map(NamePattern::from).collect::<Vec<_>>();
    let mut given: Vec<&str> = Vec::new();
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        if given.contains(&key) {
            return Err(EntryFault::Twice { key: key.to_owned() });
        }
        given.push(key);
        match key {
            "roles" => {
                rights.roles = value.parse().map_err(|source| EntryFault::Role { source })?;
            }
            "tasks" => {
                rights.tasks = patterns(value);
                // A name that is no task matches none, so its owner would always be refused.
                if let Some(found) = value.split(',').find(|task| !task.starts_with("/job:")) {
                    return Err(EntryFault::Task { found: found.to_owned() });
                }
            }
            "functions" => rights.functions = patterns(value),
            "connections" => {
                let count = value.parse().ok().filter(|&count| count > 0);
                rights.connections_max = Some(count.ok_or(EntryFault::Connections)?);
            }
            "as" => {
                check_name(value)?;
                known_as = Some(value);
            }
            // It may be a secret with a space in it.
            _ => return Err(EntryFault::Key),
        }
    }
    if rights.roles.is_empty() {
        return Err(EntryFault::NoRole);
    }
    if rights.roles.contains(Role::Client {}) && rights.functions.is_empty() {
        return Err(EntryFault::NoFunction);
    }
    Ok((rights, known_as))
}

/// A file of access tokens with a fault.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AccessListError {
    /// It has no entry, so nobody could connect.
    #[error("it has no token and no certificate, so nobody could connect")]
    Empty,
    /// A line is no entry.
    #[error("line {line} is no entry")]
    Line {
        /// The number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        fault: EntryFault,
    },
}

/// What is wrong with an entry.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EntryFault {
    /// It begins with another word.
    #[error("it begins neither with \"token\" nor with \"certificate\"")]
    Kind,
    /// The name of a token is empty, too long, or has other characters.
    #[error("the name of a token must be 1 to 64 letters, digits, dots, dashes and underscores")]
    Name,
    /// There is no pattern of the names of certificates.
    #[error("it names no certificate, such as /job:ps/task:*")]
    Pattern,
    /// The secret is none.
    #[error("it has no secret")]
    Secret {
        /// Why.
        source: SecretError,
    },
    /// A word behind the secret is no setting.
    #[error(
        "it has a word that is not roles=, tasks=, functions=, connections= or, of a token, as="
    )]
    Key,
    /// A setting is given twice.
    #[error("it has {key}= twice")]
    Twice {
        /// The setting.
        key: String,
    },
    /// A role is misspelt.
    #[error("it names a role that does not exist")]
    Role {
        /// The name.
        source: UnknownRole,
    },
    /// A task is not written as one.
    #[error("{found:?} is no task, such as /job:worker/task:*")]
    Task {
        /// The text.
        found: String,
    },
    /// The number of connections is none.
    #[error("connections= is followed by no number, such as 64")]
    Connections,
    /// It gives no role.
    #[error("it gives no role: add roles=, such as roles=worker")]
    NoRole,
    /// A client may call no function.
    #[error("it gives the role client, and no function: add functions=, such as functions=eval*")]
    NoFunction,
    /// An earlier line has the same name.
    #[error("{name} is also the name of line {first}")]
    Again {
        /// The name.
        name: String,
        /// The number of the earlier line.
        first: usize,
    },
    /// The file is too long.
    #[error("there are more than {} entries", AccessList::ENTRIES_MAX)]
    TooMany,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pushpull_common::error::Chain;

    use super::*;

    const SECRET: &str = "00112233445566778899aabbccddeeff";

    #[test]
    fn entries_say_who_may_do_what() {
        let text = format!(
            "# Of this cluster.\n\
             token trainers-1 {SECRET} roles=worker,chief tasks=/job:worker/task:*\n\
             \n\
             \ttoken  caller  {SECRET}{SECRET}\troles=client,reader  functions=eval*,predict \r\n\
             token trainers-2 {SECRET} tasks=/job:worker/task:1,/job:eval/task:0 roles=worker\n\
             certificate /job:ps/task:* roles=peer\n\
             certificate *.example.org roles=reader"
        );
        let list = AccessList::parse(&text).unwrap();
        let names: Vec<&str> = list.tokens().iter().map(|token| &*token.name).collect();
        assert_eq!(names, ["trainers-1", "caller", "trainers-2"]);
        let rights = |name: &str| &list.token(name).unwrap().principal.rights;
        assert!(rights("caller").permit_call("predict") && !rights("caller").permit_call("train"));
        assert!(rights("trainers-2").permit(Role::Worker {}, &TaskId::worker(1)));
        assert!(list.token("trainers").is_none());

        let own = |role, task| list.own_token(role, &task).map(|token| &*token.name);
        assert_eq!(own(Role::Worker {}, TaskId::worker(1)), Some("trainers-1"), "the first");
        assert_eq!(own(Role::Worker {}, TaskId::new("eval", 0)), Some("trainers-2"));
        assert_eq!(own(Role::Peer {}, TaskId::ps(0)), None);

        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            list.certificate(&names)
        };
        let peer = of(&["spare", "/job:ps/task:3"]).unwrap();
        assert_eq!((&*peer.name, peer.rights.roles.to_string()), ("/job:ps/task:3", "peer".into()));
        assert!(peer.rights.permit(Role::Peer {}, &TaskId::ps(3)));
        assert!(!peer.rights.permit(Role::Peer {}, &TaskId::ps(2)), "it is the task that it names");
        assert_eq!(of(&["a.example.org"]).unwrap().rights.roles.to_string(), "reader");
        assert_eq!(of(&["/job:worker/task:0"]), None);
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn several_tokens_may_have_one_owner() {
        let line = |name: &str, rest: &str| format!("token {name} {SECRET} roles=worker{rest}\n");
        let lines = line("a", "") + &line("b", " as=a") + &line("c", " as=owner");
        let list = AccessList::parse(&lines).unwrap();
        let owners: Vec<(&str, &str)> =
            list.tokens().iter().map(|of| (&*of.name, &*of.principal.name)).collect();
        assert_eq!(owners, [("a", "a"), ("b", "a"), ("c", "owner")]);
    }

    #[test]
    fn faults_are_told_by_line_and_tell_no_secret() {
        let table = [
            ("", "it has no token and no certificate, so nobody could connect"),
            ("# only this\n\n", "it has no token and no certificate, so nobody could connect"),
            ("tokens x", "it begins neither with \"token\" nor with \"certificate\""),
            (
                "token",
                "the name of a token must be 1 to 64 letters, digits, dots, dashes and underscores",
            ),
            (
                "token a/b S roles=worker",
                "the name of a token must be 1 to 64 letters, digits, dots, dashes and underscores",
            ),
            ("token a", "it has no secret: the secret has 0 bits, not 128 to 512"),
            (
                "token a roles=worker",
                "it has no secret: the secret must be pairs of hexadecimal digits",
            ),
            (
                "token a 0011 roles=worker",
                "it has no secret: the secret has 16 bits, not 128 to 512",
            ),
            ("token a S", "it gives no role: add roles=, such as roles=worker"),
            (
                "token a S S roles=worker",
                "it has a word that is not roles=, tasks=, functions=, connections= or, of a token, as=",
            ),
            (
                "token a S roles=",
                "it names a role that does not exist: no role is named \"\"; the roles are worker, chief, reader, admin, peer, client, rank and task",
            ),
            (
                "token a S roles=root",
                "it names a role that does not exist: no role is named \"root\"; the roles are worker, chief, reader, admin, peer, client, rank and task",
            ),
            ("token a S roles=worker roles=chief", "it has roles= twice"),
            (
                "token a S roles=worker tasks=worker:0",
                "\"worker:0\" is no task, such as /job:worker/task:*",
            ),
            ("token a S roles=worker tasks=", "\"\" is no task, such as /job:worker/task:*"),
            (
                "token a S roles=worker as=two,names",
                "the name of a token must be 1 to 64 letters, digits, dots, dashes and underscores",
            ),
            (
                "certificate x roles=worker as=y",
                "it has a word that is not roles=, tasks=, functions=, connections= or, of a token, as=",
            ),
            (
                "token a S roles=worker connections=0",
                "connections= is followed by no number, such as 64",
            ),
            (
                "token a S roles=client",
                "it gives the role client, and no function: add functions=, such as functions=eval*",
            ),
            (
                "token a S roles=worker\ntoken b S roles=worker\ntoken a S roles=reader",
                "a is also the name of line 1",
            ),
            ("certificate", "it names no certificate, such as /job:ps/task:*"),
            ("certificate roles=peer", "it names no certificate, such as /job:ps/task:*"),
            ("certificate x", "it gives no role: add roles=, such as roles=worker"),
        ];
        for (text, expected) in table {
            let error = AccessList::parse(&text.replace('S', SECRET)).unwrap_err();
            let told = Chain(&error).to_string();
            assert!(!told.contains(SECRET), "{told}");
            let lines = text.lines().count();
            match text.is_empty() || text.starts_with('#') {
                true => assert_eq!(told, expected),
                false => assert_eq!(told, format!("line {lines} is no entry: {expected}")),
            }
        }
    }

    #[test]
    fn a_list_is_bounded() {
        let entry = |index| format!("certificate host-{index} roles=reader\n");
        let text: String = (0..AccessList::ENTRIES_MAX).map(entry).collect();
        assert!(AccessList::parse(&text).is_ok());
        let error = AccessList::parse(&format!("{text}{}", entry(usize::MAX))).unwrap_err();
        assert_eq!(
            Chain(&error).to_string(),
            "line 10001 is no entry: there are more than 10000 entries"
        );
    }

    /// A word that is a secret, or a piece of one that somebody has cut.
    fn secret_word() -> impl Strategy<Value = String> {
        "[0-9a-fA-F]{16,140}"
    }

    /// A word of a line that is not its name.
    fn word() -> impl Strategy<Value = String> {
        prop_oneof![
            3 => secret_word(),
            2 => "(roles|tasks|functions|connections)=[a-z0-9/:*,é-]{0,12}",
            2 => prop::sample::select(vec!["roles=worker", "roles=client,chief", "functions=eval*"])
                .prop_map(str::to_owned),
            1 => (secret_word(), "=?[^\\s]{0,4}").prop_map(|(secret, end)| secret + &end),
            1 => "[^\\s]{0,8}",
        ]
    }

    /// A line, with its secrets wherever somebody may have put them. A name is no secret.
    fn line() -> impl Strategy<Value = String> {
        let kind = prop_oneof![
            4 => Just("token".to_owned()),
            1 => Just("certificate".to_owned()),
            1 => secret_word(),
            1 => "[a-z#]{0,8}",
        ];
        let name = prop_oneof![4 => "[a-c]", 1 => "[a-z0-9._/:*=-]{1,12}", 1 => "[^\\s]{1,4}"];
        let rest = prop::collection::vec(word(), 0..4);
        let space = prop::sample::select(vec![" ", "\t", "  ", "\u{3000}"]);
        (kind, name, rest, space).prop_map(|(kind, name, rest, space)| {
            let words: Vec<String> = [kind, name].into_iter().chain(rest).collect();
            words.join(space)
        })
    }

    proptest! {
        #[test]
        fn no_list_and_no_fault_displays_a_secret(
            lines in prop::collection::vec(line(), 0..6),
            end in prop::sample::select(vec!["\n", "\r\n", "\n\n"]),
        ) {
            let text = lines.join(end);
            let told = match AccessList::parse(&text) {
                Ok(list) => format!("{list:?}"),
                Err(error) => format!("{} {error:?}", Chain(&error)),
            };
            // Nothing else has as many digits in a row.
            let digits = told.split(|letter: char| !letter.is_ascii_hexdigit());
            let longest = digits.max_by_key(|digits| digits.len()).unwrap_or_default();
            prop_assert!(longest.len() < 16, "{longest:?} in {told:?} of {text:?}");
        }

        #[test]
        fn any_text_is_a_list_or_a_fault(text in "(token |certificate )?(.|\\s|[a-f0-9=]){0,200}") {
            let _ = AccessList::parse(&text);
        }
    }
}
