//! [`Description`]: the cluster, functions and devices of a server, as clients read them.

use std::collections::BTreeMap;

use pushpull_common::cluster::ClusterSpec;
use serde_json::{Map, Value as Json, json};

use super::device_name::TaskDevice;
use super::function_table::FunctionTable;

/// The description of a server: its cluster, functions and devices.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// The cluster with the addresses of its tasks.
    pub cluster: ClusterSpec,
    /// The signatures of the functions by their names; `(..)` for a function without one.
    pub functions: BTreeMap<String, String>,
    /// The full names of the devices. A device that cannot be used has the reason beside it.
    pub devices: Vec<(String, Option<String>)>,
}

impl Description {
    pub(crate) fn new(
        cluster: ClusterSpec,
        functions: &FunctionTable,
        devices: &[TaskDevice],
    ) -> Description {
        let functions = functions.iter();
        let devices = devices.iter().map(|d| (d.name.to_string(), d.unusable.clone())).collect();
        let signature = |(name, facts): (&str, &super::function_table::FunctionFacts)| {
            (name.to_owned(), facts.signature_text())
        };
        Description { cluster, functions: functions.map(signature).collect(), devices }
    }

    /// Returns the description encoded as JSON.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let functions: Map<String, Json> =
            self.functions.iter().map(|(name, text)| (name.clone(), json!(text))).collect();
        let device = |(name, unusable): &(String, Option<String>)| match unusable {
            None => json!({ "name": name }),
            Some(reason) => json!({ "name": name, "unusable": reason }),
        };
        let devices: Vec<Json> = self.devices.iter().map(device).collect();
        let cluster = self.cluster.to_string();
        json!({ "cluster": cluster, "functions": functions, "devices": devices })
            .to_string()
            .into_bytes()
    }

    /// Decodes a description, or returns the reason why the bytes are none.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Description, String> {
        let json: Json = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let text = |json: &Json, field: &str| {
            json[field]
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| format!("field {field:?} is not text"))
        };
        let cluster = text(&json, "cluster")?.parse().map_err(|error| format!("{error}"))?;
        let functions = json["functions"].as_object().ok_or("no functions")?;
        let signature = |(name, signature): (&String, &Json)| {
            let signature =
                signature.as_str().ok_or_else(|| format!("no signature of {name:?}"))?;
            Ok((name.clone(), signature.to_owned()))
        };
        let functions = functions.iter().map(signature).collect::<Result<_, String>>()?;
        let devices = json["devices"].as_array().ok_or("no devices")?.iter();
        let device = |device: &Json| {
            Ok((text(device, "name")?, device["unusable"].as_str().map(str::to_owned)))
        };
        let devices = devices.map(device).collect::<Result<_, String>>()?;
        Ok(Description { cluster, functions, devices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_round_trip_and_bad_ones_are_named() {
        let description = Description {
            cluster: "ps=a:1;worker=b:1,c:1".parse().unwrap(),
            functions: [("f".to_owned(), "(..)".to_owned())].into(),
            devices: vec![
                ("/device:CPU:0".to_owned(), None),
                ("/device:GPU:0".to_owned(), Some("no driver".to_owned())),
            ],
        };
        assert_eq!(Description::decode(&description.encode()), Ok(description));
        for bad in ["", "[]", "{}", r#"{"cluster":"ps=","functions":{},"devices":[{}]}"#] {
            assert!(Description::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
