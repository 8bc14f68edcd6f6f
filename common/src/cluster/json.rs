//! The JSON form of a cluster, as in `TF_CONFIG`: each job is a list or a map by index.

use serde_json::{Map, Value};

use super::error::clip;
use super::unique_keys::UniqueKeys;
use super::{ClusterError, ClusterSpec, Job, is_dense};
use crate::ids::TaskId;

impl ClusterSpec {
    /// Reads a cluster such as `{"ps": ["a:1", "b:1"], "worker": {"3": "c:1"}}`.
    ///
    /// A job is a list of addresses or a map from index to address. Any other value is an error
    /// that names the job. Text that is not JSON is an error with its line and column, and so is a
    /// repeated key; `"1"` and `"01"` are duplicates as well.
    ///
    /// A whole `TF_CONFIG` is taken as well: of `{"cluster": {...}, "task": {...}}` the part
    /// `cluster` is the cluster, and [`ClusterSpec::task_of_json`] returns its task. A `task` without
    /// a `cluster` is [`ClusterError::NoCluster`].
    pub fn from_json(text: &str) -> Result<ClusterSpec, ClusterError> {
        ClusterSpec::from_json_value(&json_value(text)?)
    }

    /// Returns the task that a whole `TF_CONFIG` names in its part `task`, such as
    /// `{"type": "ps", "index": 1}`; `None` if the text is a cluster alone, or names no task. The
    /// index of the only task of a job may be left out, and is then 0.
    ///
    /// # Errors
    /// [`ClusterError::NotTask`] and [`ClusterError::NoTaskIndex`], and those of
    /// [`ClusterSpec::from_json`] for text that is not JSON.
    pub fn task_of_json(text: &str) -> Result<Option<TaskId>, ClusterError> {
        let value = json_value(text)?;
        let Some((jobs, task)) = classic_cluster(&value).zip(value.get("task")) else {
            return Ok(None);
        };
        let job = task.get("type").and_then(Value::as_str);
        let tasks = job.and_then(|job| jobs.get(job)).map_or(0, num_entries);
        if let Some(job) = job.filter(|_| tasks > 1 && task.get("index").is_none()) {
            return Err(ClusterError::NoTaskIndex { job: clip(job), tasks });
        }
        let index = task.get("index").map_or(Some(0), Value::as_u64);
        match job.zip(index.and_then(|index| u32::try_from(index).ok())) {
            Some((job, index)) => Ok(Some(TaskId::new(job, index))),
            None => Err(ClusterError::NotTask { found: clip(&task.to_string()) }),
        }
    }

    fn from_json_value(value: &Value) -> Result<ClusterSpec, ClusterError> {
        let jobs = classic_cluster(value).unwrap_or(value);
        if let Value::Object(jobs) = jobs {
            check_parts(jobs)?;
        }
        ClusterSpec::from_jobs(jobs)
    }

    /// Reads the jobs of a cluster, each a list or a map.
    pub(super) fn from_jobs(value: &Value) -> Result<ClusterSpec, ClusterError> {
        let Value::Object(jobs) = value else {
            return Err(ClusterError::NotJobs { found: kind(value) });
        };
        let mut builder = ClusterSpec::builder();
        for (name, job) in jobs {
            builder = builder.sparse_job(name, read_tasks(name, job)?);
        }
        builder.build()
    }

    /// Writes the JSON form in one line: a list for a dense job, a map for a sparse or empty one.
    pub fn to_json(&self) -> String {
        let jobs = self.jobs.iter().map(|(name, job)| (name.to_string(), write_tasks(job)));
        Value::Object(jobs.collect()).to_string()
    }
}

/// Parses text of bounded length. A repeated key is an error.
pub(super) fn json_value(text: &str) -> Result<Value, ClusterError> {
    if text.len() > ClusterSpec::TEXT_BYTES_MAX {
        return Err(ClusterError::TooLong { bytes: text.len() });
    }
    let parsed: Result<UniqueKeys, _> = serde_json::from_str(text);
    parsed.map(|UniqueKeys(value)| value).map_err(|error| ClusterError::Json {
        line: error.line(),
        column: error.column(),
        reason: error.to_string(),
    })
}

/// Returns the part `cluster` of a whole `TF_CONFIG`. A job of this name has numbered addresses.
fn classic_cluster(value: &Value) -> Option<&Value> {
    let parts = value.as_object()?;
    let cluster = parts.get("cluster")?;
    let jobs = cluster.as_object()?;
    let is_job = |job: &Value| job.is_array() || job.is_object();
    let is_classic = match jobs.is_empty() {
        // A cluster without jobs, unless other jobs are beside it.
        true => !parts.values().any(Value::is_array),
        false => names_no_index(jobs) || jobs.values().any(is_job),
    };
    is_classic.then_some(cluster)
}

/// Returns an error if the value is a `TF_CONFIG` without its part `cluster`, and not the jobs of a
/// cluster.
fn check_parts(parts: &Map<String, Value>) -> Result<(), ClusterError> {
    let is_part = |part: &Value| part.as_object().is_some_and(names_no_index);
    let is_misspelt = |name: &str| name != "cluster" && name.eq_ignore_ascii_case("cluster");
    let misspelt = parts.iter().find(|(name, part)| is_misspelt(name) && is_part(part));
    match misspelt {
        Some((name, _)) => Err(ClusterError::NoCluster { found: name.clone() }),
        None if parts.get("task").is_some_and(is_part) => {
            Err(ClusterError::NoCluster { found: "task".to_owned() })
        }
        None => Ok(()),
    }
}

/// Returns whether a map has a key that is no index.
fn names_no_index(map: &Map<String, Value>) -> bool {
    !map.keys().all(|key| is_index(key))
}

/// Returns the number of entries of a list or a map.
fn num_entries(value: &Value) -> usize {
    value.as_array().map(Vec::len).or(value.as_object().map(Map::len)).unwrap_or(0)
}

fn read_tasks<'a>(name: &str, job: &'a Value) -> Result<Vec<(u32, &'a str)>, ClusterError> {
    match job {
        Value::Array(list) => (0u32..)
            .zip(list)
            .map(|(index, address)| Ok((index, read_address(name, &index.to_string(), address)?)))
            .collect(),
        Value::Object(map) => map
            .iter()
            .map(|(key, address)| Ok((read_index(name, key)?, read_address(name, key, address)?)))
            .collect(),
        _ => Err(ClusterError::NotTasks { job: clip(name), found: kind(job) }),
    }
}

/// Parses a task index: decimal digits only.
pub(super) fn read_index(job: &str, text: &str) -> Result<u32, ClusterError> {
    match text.parse() {
        Ok(index) if is_index(text) => Ok(index),
        _ => Err(ClusterError::Index { job: clip(job), index: clip(text) }),
    }
}

fn is_index(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn read_address<'a>(job: &str, index: &str, value: &'a Value) -> Result<&'a str, ClusterError> {
    value.as_str().ok_or_else(|| ClusterError::NotAddress {
        job: clip(job),
        index: clip(index),
        found: kind(value),
    })
}

fn write_tasks(job: &Job) -> Value {
    let text = |address: &str| Value::String(address.to_owned());
    match is_dense(job) {
        true => Value::Array(job.values().map(|address| text(address)).collect()),
        false => {
            let tasks = job.iter().map(|(index, address)| (index.to_string(), text(address)));
            Value::Object(tasks.collect::<Map<_, _>>())
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a map",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_task_of_a_classic_configuration_is_read() {
        let of = |task: &str| {
            ClusterSpec::task_of_json(&format!(r#"{{"cluster":{{"ps":["a:1"]}}{task}}}"#))
        };
        assert_eq!(of(""), Ok(None));
        let ps = r#","task":{"type":"ps","index":1}"#;
        assert_eq!(of(ps), Ok(Some(TaskId::ps(1))));
        let chief = r#","environment":"cloud","task":{"type":"chief"}"#;
        assert_eq!(of(chief), Ok(Some(TaskId::new("chief", 0))));
        assert_eq!(ClusterSpec::task_of_json(r#"{"ps":["a:1"],"task":["b:1"]}"#), Ok(None));
        let of_two = |task: &str| {
            let cluster = r#"{"cluster":{"ps":["a:1","b:1"],"w":{"3":"c:1","5":"d:1"}},"task":"#;
            ClusterSpec::task_of_json(&format!("{cluster}{task}}}"))
        };
        assert_eq!(of_two(r#"{"type":"ps","index":1}"#), Ok(Some(TaskId::ps(1))));
        for job in ["ps", "w"] {
            let error = of_two(&format!(r#"{{"type":"{job}"}}"#)).unwrap_err().to_string();
            let expected = "cannot read the task: its index is missing, and the job ";
            assert_eq!(error, format!("{expected}{job} has 2 tasks"));
        }
        for bad in [r#"{"index":1}"#, r#"{"index":-1,"type":"ps"}"#, r#"{"type":2}"#, "[]", "3"] {
            let error = of(&format!(r#","task":{bad}"#)).unwrap_err();
            assert!(matches!(error, ClusterError::NotTask { .. }), "{error}");
            assert!(error.to_string().contains(bad), "{error}");
        }
    }

    #[test]
    fn lists_and_maps_are_read_and_written() {
        let text = r#"{"empty":{},"ps":["p0:1","p1:1"],"worker":{"1":"w1:1","12":"w2:1"}}"#;
        let cluster = ClusterSpec::from_json(text).unwrap();
        assert_eq!(cluster.to_json(), text);
        assert_eq!(cluster.to_string(), "empty=;ps=p0:1,p1:1;worker=1@w1:1,12@w2:1");
        let dense = ClusterSpec::from_json(r#"{"a":{"1":"y:1","00":"x:1"}}"#).unwrap();
        assert_eq!(dense.to_json(), r#"{"a":["x:1","y:1"]}"#);
        assert!(ClusterSpec::from_json("{}").unwrap().is_empty());
    }

    #[test]
    fn a_whole_classic_configuration_is_taken() {
        let text = r#"{"cluster":{"chief":["c:1"],"ps":["127.0.0.1:5001"],"worker":["w:1"]},
            "task":{"type":"ps","index":0},"environment":"cloud","rpc_layer":"grpc"}"#;
        let cluster = ClusterSpec::from_json(text).unwrap();
        assert_eq!(cluster.to_string(), "chief=c:1;ps=127.0.0.1:5001;worker=w:1");
        let sparse = r#"{"cluster":{"worker":{"3":"w:1"}}}"#;
        assert_eq!(ClusterSpec::from_json(sparse).unwrap().to_string(), "worker=3@w:1");
        // A job may be called so.
        for job in
            [r#"{"cluster":["a:1"],"ps":["b:1"]}"#, r#"{"cluster":{"0":"a:1"},"ps":["b:1"]}"#]
        {
            assert_eq!(ClusterSpec::from_json(job).unwrap().to_string(), "cluster=a:1;ps=b:1");
        }
        let error = ClusterSpec::from_json(r#"{"cluster":{"ps":["a:1"],"worker":5}}"#).unwrap_err();
        let expected =
            "cannot read the job \"worker\": expected a list or map of addresses, found a number";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_repeated_key_is_refused_by_name() {
        for (text, key, position) in [
            (r#"{"ps":["a:1"],"ps":["b:1"]}"#, "ps", "line 1 column 18"),
            (r#"{"ps":{"0":"a:1","0":"b:1"}}"#, "0", "line 1 column 20"),
            (r#"{"cluster":{"ps":["a:1"]},"task":{"type":"ps","type":"ps"}}"#, "type", "line 1"),
        ] {
            let error = ClusterSpec::from_json(text).unwrap_err().to_string();
            let expected =
                format!("cannot read the cluster as JSON: the key {key:?} was given before at ");
            assert!(error.starts_with(&(expected + position)), "{error}");
        }
    }

    #[test]
    fn a_configuration_without_its_cluster_is_named_as_such() {
        let text = |json: &str| ClusterSpec::from_json(json).unwrap_err().to_string();
        let expected = "cannot read the cluster: expected {\"cluster\": JOBS, \"task\": TASK} or jobs \
                        alone, found ";
        assert_eq!(
            text(r#"{"task":{"type":"ps","index":0}}"#),
            format!("{expected}\"task\" and no \"cluster\"")
        );
        assert_eq!(
            text(r#"{"Cluster":{"ps":["a:1"]},"task":{"type":"ps"}}"#),
            format!("{expected}\"Cluster\" and no \"cluster\"")
        );
        assert_eq!(
            text(r#"{"cluster":{"ps":"a:1"},"task":{"type":"ps"}}"#),
            "cannot read the job \"ps\": expected a list or map of addresses, found a text"
        );
        for empty in [r#"{"cluster":{},"task":{"type":"ps","index":0}}"#, r#"{"cluster":{}}"#] {
            assert!(ClusterSpec::from_json(empty).unwrap().is_empty());
        }
        // Jobs may have these names.
        for jobs in [r#"{"task":["a:1"]}"#, r#"{"task":{"3":"a:1"}}"#, r#"{"Cluster":["a:1"]}"#] {
            assert_eq!(ClusterSpec::from_json(jobs).unwrap().jobs().count(), 1, "{jobs}");
        }
        let beside = ClusterSpec::from_json(r#"{"cluster":{},"ps":["a:1"]}"#).unwrap();
        assert_eq!(beside.to_string(), "cluster=;ps=a:1");
    }

    #[test]
    fn faults_name_the_job() {
        let table = [
            ("5", "cannot read the cluster: expected a map of jobs, found a number"),
            (
                r#"{"ps":5}"#,
                "cannot read the job \"ps\": expected a list or map of addresses, found a number",
            ),
            (
                r#"{"ps":["a:1",null]}"#,
                "cannot read the job \"ps\": expected an address for task 1, found null",
            ),
            (
                r#"{"ps":{"x":"a:1"}}"#,
                "cannot number a task of job ps \"x\": an index is a number below 1048576",
            ),
            (
                r#"{"ps":{"-1":"a:1"}}"#,
                "cannot number a task of job ps \"-1\": an index is a number below 1048576",
            ),
            (r#"{"ps":{"1":"a:1","01":"b:1"}}"#, "cannot add /job:ps/task:1: it was given before"),
        ];
        for (text, expected) in table {
            assert_eq!(ClusterSpec::from_json(text).unwrap_err().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn broken_json_has_a_position() {
        let error = ClusterSpec::from_json("{\"ps\":\n [\"a:1\"").unwrap_err();
        assert!(matches!(error, ClusterError::Json { line: 2, column: 7, .. }), "{error:?}");
        assert!(error.to_string().ends_with("at line 2 column 7"), "{error}");
        let long = " ".repeat(ClusterSpec::TEXT_BYTES_MAX + 1);
        assert!(matches!(ClusterSpec::from_json(&long), Err(ClusterError::TooLong { .. })));
        let deep = "[".repeat(100_000);
        assert!(matches!(ClusterSpec::from_json(&deep), Err(ClusterError::Json { .. })));
    }
}
