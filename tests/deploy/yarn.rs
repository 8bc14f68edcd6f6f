//! The Yarnfile: a service of YARN. No ResourceManager runs it here: the file is checked against the
//! documented fields of the YARN Service API, and its commands train on loopback.

use pushpull::{ClusterSpec, TaskId};
use serde_json::{Map, Value};

use crate::Outcome;
use crate::tasks::{PORT, Programs, Task, Tasks};

const YARNFILE: &str = include_str!("../../examples/deploy/yarn/Yarnfile");

/// The environment of a task under TonY, as its documents and its class `Constants` describe it.
const TONY: &str = include_str!("tony.env");

/// The documented fields of an object, as `name:type`; the required ones end with `!`.
const FIELDS: [(&str, &str); 5] = [
    (
        "service",
        "name:string! version:string! description:string artifact:artifact resource:resource \
         lifetime:integer components:components configuration:configuration quicklinks:object \
         queue:string kerberos_principal:object docker_client_config:string",
    ),
    (
        "component",
        "name:string! dependencies:array readiness_check:object artifact:artifact \
         launch_command:string resource:resource number_of_containers:integer \
         run_privileged_container:boolean placement_policy:object configuration:configuration \
         quicklinks:array restart_policy:restart_policy",
    ),
    ("artifact", "id:string! type:artifact_type uri:string"),
    ("resource", "profile:string cpus:integer memory:megabytes additional:object"),
    ("configuration", "properties:object env:strings files:array"),
];

/// Checks a value against its type.
fn check_value(path: &str, kind: &str, value: &Value) -> Result<(), String> {
    let one_of = |names: &[&str]| value.as_str().is_some_and(|text| names.contains(&text));
    let is_right = match kind {
        "string" => value.is_string(),
        "integer" => value.is_u64(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "strings" => value.as_object().is_some_and(|object| object.values().all(Value::is_string)),
        // A number of megabytes, as a text.
        "megabytes" => value.as_str().is_some_and(|text| text.parse::<u64>().is_ok()),
        "artifact_type" => one_of(&["DOCKER", "TARBALL", "SERVICE"]),
        "restart_policy" => one_of(&["ALWAYS", "ON_FAILURE", "NEVER"]),
        "components" => {
            for component in value.as_array().into_iter().flatten() {
                check_object(&format!("{path}.{}", component["name"]), "component", component)?;
            }
            value.is_array()
        }
        _ => return check_object(path, kind, value),
    };
    if is_right { Ok(()) } else { Err(format!("{path} is no {kind}: {value}")) }
}

/// Checks the fields of an object.
fn check_object(path: &str, kind: &str, value: &Value) -> Result<(), String> {
    let (_, fields) = FIELDS.iter().find(|(name, _)| *name == kind).unwrap();
    let object: &Map<String, Value> =
        value.as_object().ok_or_else(|| format!("{path} is no object: {value}"))?;
    let mut unknown: Vec<&String> = object.keys().collect();
    for field in fields.split_ascii_whitespace() {
        let (name, kind) = field.split_once(':').unwrap();
        unknown.retain(|key| *key != name);
        match object.get(name) {
            Some(value) => {
                check_value(&format!("{path}.{name}"), kind.trim_end_matches('!'), value)?;
            }
            None if kind.ends_with('!') => return Err(format!("{path} has no {name}")),
            None => {}
        }
    }
    match unknown.first() {
        None => Ok(()),
        Some(name) => Err(format!("{path}.{name} is no field of a {kind}")),
    }
}

/// Checks the file against the fields of the API. Files with faults show that it would find them.
pub(crate) fn check() -> Outcome {
    let service: Value = serde_json::from_str(YARNFILE).map_err(|error| error.to_string())?;
    check_object("service", "service", &service)?;
    let mut component = service["components"][0].clone();
    component["resource"]["memory"] = 2048.into();
    let mut faults = vec![component];
    for field in ["name", "launch_comand", "restart_policy"] {
        let mut component = service["components"][0].clone();
        component[field] = Value::Null;
        faults.push(component);
    }
    for fault in faults {
        if check_object("component", "component", &fault).is_ok() {
            return Err(format!("no fault is found in {fault}"));
        }
    }
    Ok("every field is one of the API's".to_owned())
}

/// Checks that both descriptions of a cluster in the environment of a task of TonY are one cluster, and
/// that they name the task.
pub(crate) fn check_tony() -> Outcome {
    let lookup = |name: &str| {
        let mut lines = TONY.lines().filter_map(|line| line.split_once('='));
        lines.find(|(known, _)| *known == name).map(|(_, value)| value)
    };
    let value = |name: &str| lookup(name).ok_or_else(|| format!("there is no {name}"));
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let config = value("TF_CONFIG")?;
    let cluster = ClusterSpec::from_json(config).map_err(|error| text(&error))?;
    let spec = ClusterSpec::from_json(value("CLUSTER_SPEC")?).map_err(|error| text(&error))?;
    let task = ClusterSpec::task_of_json(config).map_err(|error| text(&error))?;
    let index: u32 = value("TASK_INDEX")?.parse().map_err(|error| text(&error))?;
    let own = TaskId::new(value("JOB_NAME")?, index);
    match cluster == spec && task.as_ref() == Some(&own) {
        true => Ok(format!("{own}")),
        false => Err(format!("{cluster:?} and {spec:?}, {task:?} and {own}")),
    }
}

/// Trains with the commands of the service, one for each container.
pub(crate) fn train(programs: &Programs) -> Outcome {
    let service: Value = serde_json::from_str(YARNFILE).map_err(|error| error.to_string())?;
    let host = |index: u64| format!("ps-{index}.digits.alice.example.org:{PORT}");
    let tasks_of = |component: &Value| -> Vec<Task> {
        let command = component["launch_command"].as_str().unwrap_or_default();
        let containers = component["number_of_containers"].as_u64().unwrap_or(0);
        let task_of = |index: u64| {
            // The name of the service is the launcher's choice: `yarn app -launch digits Yarnfile`.
            let tokens = [
                ("${SERVICE_NAME}", "digits"),
                ("${USER}", "alice"),
                ("${DOMAIN}", "example.org"),
                ("${COMPONENT_ID}", &index.to_string()),
            ];
            let command = tokens
                .iter()
                .fold(command.to_owned(), |command, (token, value)| command.replace(token, value));
            let command = command.split(',').map(str::to_owned).collect();
            Task { command, variables: Vec::new() }
        };
        (0..containers).map(task_of).collect()
    };
    let mut tasks = Tasks::default();
    for component in service["components"].as_array().into_iter().flatten() {
        match component["name"].as_str() {
            Some("ps") => {
                tasks.servers = tasks_of(component);
                tasks.names = (0..tasks.servers.len() as u64).map(host).collect();
            }
            Some("worker") => tasks.workers = tasks_of(component),
            name => return Err(format!("a component is {name:?}")),
        }
    }
    tasks.train(programs)
}
