//! Who a peer is, as it has proved, and what it may do.

mod event;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::ids::TaskId;
use crate::names::NamePattern;
use crate::protocol::message::Role;
pub use event::{AccessEvent, DeniedPeer};

/// A peer that has proved who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Its name: that of its access token or certificate.
    pub name: String,
    /// What it may do.
    pub rights: AccessRights,
}

/// What a principal may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessRights {
    /// The roles in which it may connect.
    pub roles: Roles,
    /// The tasks that it may be, such as `/job:worker/task:*`. None means any.
    pub tasks: Vec<NamePattern>,
    /// The functions that it may call as a client. None means none.
    pub functions: Vec<NamePattern>,
    /// Whether it may also be the chief, as the first task of a job.
    pub first_is_chief: bool,
    /// The most connections that it may have to a server at once. `None` means no limit of its own.
    pub connections_max: Option<u32>,
}

impl AccessRights {
    /// Returns whether the principal may connect in a role, as a task.
    ///
    /// The functions of a task train under a name of their own, which belongs to the task.
    pub fn permit(&self, role: Role, task: &TaskId) -> bool {
        let may_lead = self.first_is_chief && role == (Role::Chief {}) && task.index == 0;
        let task = task.of_functions().unwrap_or_else(|| task.clone());
        (self.roles.contains(role) || may_lead) && self.name_task(&task.to_string())
    }

    /// Returns whether the principal may connect in a role as every task of a job.
    pub fn permit_every(&self, role: Role, job: &str) -> bool {
        self.roles.contains(role) && self.name_task(&format!("/job:{job}/task:*"))
    }

    fn name_task(&self, task: &str) -> bool {
        self.tasks.is_empty() || self.tasks.iter().any(|of| of.matches(task))
    }

    /// Returns whether the principal may call a function.
    pub fn permit_call(&self, function: &str) -> bool {
        self.roles.contains(Role::Client {}) && self.functions.iter().any(|of| of.matches(function))
    }
}

/// A set of roles.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Roles(u16);

impl Roles {
    /// Returns the set of these roles.
    pub const fn of(roles: &[Role]) -> Roles {
        let mut bits = 0;
        let mut next = 0;
        while next < roles.len() {
            bits |= bit(roles[next]);
            next += 1;
        }
        Roles(bits)
    }

    /// Returns the set of all roles.
    pub fn all() -> Roles {
        NAMES.iter().fold(Roles::default(), |roles, (_, role)| roles.with(*role))
    }

    /// Returns whether a role is in the set.
    pub fn contains(self, role: Role) -> bool {
        self.0 & bit(role) != 0
    }

    /// Returns the roles of either set.
    #[must_use]
    pub const fn and(self, other: Roles) -> Roles {
        Roles(self.0 | other.0)
    }

    /// Returns the set with one more role.
    #[must_use]
    pub fn with(self, role: Role) -> Roles {
        Roles(self.0 | bit(role))
    }

    /// Returns whether the set has no role.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

const fn bit(role: Role) -> u16 {
    1 << role.code()
}

/// The names of the roles, as files and flags have them.
const NAMES: [(&str, Role); 8] = [
    ("worker", Role::Worker {}),
    ("chief", Role::Chief {}),
    ("reader", Role::Reader {}),
    ("admin", Role::Admin {}),
    ("peer", Role::Peer {}),
    ("client", Role::Client {}),
    ("rank", Role::Rank {}),
    ("task", Role::Task {}),
];

/// A text that names no role.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "no role is named {name:?}; the roles are worker, chief, reader, admin, peer, client, rank and task"
)]
pub struct UnknownRole {
    /// The text.
    pub name: String,
}

impl FromStr for Roles {
    type Err = UnknownRole;

    /// Parses names with commas between them, such as `worker,chief`.
    fn from_str(text: &str) -> Result<Roles, UnknownRole> {
        text.split(',').try_fold(Roles::default(), |roles, name| {
            let named = NAMES.iter().find(|(of, _)| *of == name);
            let (_, role) = named.ok_or_else(|| UnknownRole { name: name.to_owned() })?;
            Ok(roles.with(*role))
        })
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = NAMES.iter().filter(|(_, role)| self.contains(*role));
        let names: Vec<&str> = named.map(|(name, _)| *name).collect();
        f.write_str(&names.join(","))
    }
}

impl fmt::Debug for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Roles({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rights(roles: &str, tasks: &[&str], functions: &[&str]) -> AccessRights {
        let patterns = |of: &[&str]| of.iter().map(|&of| NamePattern::from(of)).collect();
        AccessRights {
            roles: roles.parse().unwrap(),
            tasks: patterns(tasks),
            functions: patterns(functions),
            ..AccessRights::default()
        }
    }

    #[test]
    fn roles_are_read_and_written_by_name() {
        for text in ["worker", "worker,chief", "reader,admin,peer,client,rank,task"] {
            assert_eq!(text.parse::<Roles>().unwrap().to_string(), text);
        }
        let all = NAMES.iter().fold(Roles::default(), |roles, (_, role)| roles.with(*role));
        assert_eq!(all.to_string().parse(), Ok(all));
        for (text, name) in [("", ""), ("worker,", ""), ("Worker", "Worker"), ("root", "root")] {
            assert_eq!(text.parse::<Roles>(), Err(UnknownRole { name: name.to_owned() }));
        }
        assert!(Roles::default().is_empty() && !all.is_empty());
    }

    #[test]
    fn a_principal_is_the_tasks_of_its_patterns_in_its_roles() {
        let one = rights("worker", &["/job:worker/task:1"], &[]);
        let any = rights("worker,chief", &["/job:worker/task:*", "/job:eval/task:0"], &[]);
        let functions = TaskId::worker(1).for_functions().unwrap();
        let table = [
            (&one, Role::Worker {}, TaskId::worker(1), true),
            (&one, Role::Worker {}, functions, true),
            (&one, Role::Worker {}, TaskId::worker(0), false),
            (&one, Role::Worker {}, TaskId::worker(11), false),
            (&one, Role::Chief {}, TaskId::worker(1), false),
            (&one, Role::Reader {}, TaskId::worker(1), false),
            (&any, Role::Chief {}, TaskId::worker(0), true),
            (&any, Role::Worker {}, TaskId::new("eval", 0), true),
            (&any, Role::Worker {}, TaskId::new("eval", 1), false),
            (&any, Role::Peer {}, TaskId::new("ps", 0), false),
        ];
        for (rights, role, task, expected) in table {
            assert_eq!(rights.permit(role, &task), expected, "{role:?} as {task} under {rights:?}");
        }
        let of_certificate = AccessRights {
            first_is_chief: true,
            ..rights("worker", &["/job:worker/task:*", "/job:eval/task:1"], &[])
        };
        let leads = |task| of_certificate.permit(Role::Chief {}, &task);
        assert!(leads(TaskId::worker(0)) && !leads(TaskId::worker(1)));
        assert!(!leads(TaskId::new("eval", 1)) && !leads(TaskId::new("eval", 0)));
        let reader = rights("reader", &[], &[]);
        assert!(reader.permit(Role::Reader {}, &TaskId::new("anything", 7)), "any task");
    }

    #[test]
    fn a_client_calls_the_functions_that_it_names() {
        let some = rights("client", &[], &["eval*", "predict"]);
        let calls = ["eval", "evaluate", "predict", "predict2", "train"];
        assert_eq!(calls.map(|name| some.permit_call(name)), [true, true, true, false, false]);
        assert!(!rights("client", &[], &[]).permit_call("eval"), "none is named");
        assert!(!rights("worker", &[], &["*"]).permit_call("eval"), "it is no client");
    }
}
